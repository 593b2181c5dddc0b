// The answer of a selector (select/): what attention (attention/) reads of one KV head for one
// block of query tokens, and what it approximates.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {

// Contiguous slots.
struct KeyRun {
  uint32_t first = 0;
  uint32_t length = 0;

  bool touches(const KeyRun& next) const { return first + length == next.first; }
};

// Contiguous clusters of one level.
struct ClusterRun {
  uint32_t level = 0;  // index into LayerView::level
  uint32_t first = 0;
  uint32_t length = 0;

  bool touches(const ClusterRun& next) const {
    return level == next.level && first + length == next.first;
  }
};

// Ascending, disjoint runs in memory that somebody else owns and that has room for all of them.
template <class Run>
struct RunList {
  std::span<Run> room;
  int64_t count = 0;  // runs
  int64_t total = 0;  // keys or clusters in these runs

  std::span<const Run> runs() const { return room.first(static_cast<size_t>(count)); }
  void clear() { count = total = 0; }
  // `next` begins at or after the end of the last run, which it extends if the two touch.
  void append(const Run& next) {
    if (next.length == 0) return;
    total += next.length;
    if (count > 0 && room[count - 1].touches(next)) {
      room[count - 1].length += next.length;
    } else {
      room[count++] = next;
    }
  }
};

// RunList::append() for a list that grows.
template <class Run>
void extend(std::vector<Run>& runs, const Run& next) {
  if (!runs.empty() && runs.back().touches(next)) {
    runs.back().length += next.length;
  } else {
    runs.push_back(next);
  }
}

// The approximated keys of one finest cluster as one entry: for each query row the log of the sum
// of exp over their logits.
struct ClusterWeight {
  uint32_t cluster = 0;
  std::array<float, kFewRows> logits = {};
};

struct HeadSelection {
  RunList<KeyRun> read;          // slots
  RunList<ClusterRun> clusters;  // unread; they count as their centroids, with their mean values
  RunList<KeyRun> by_code;       // unread slots of other clusters; they count by their key codes
  // The keys of `by_code` once more. For few query rows the selector knows their logits, and
  // attention takes these sums instead of the codes.
  std::span<ClusterWeight> weight_room;
  int64_t weight_count = 0;
  int64_t exact_skipped = 0;  // first exact keys that are not read
  // Rows that were read to decide.
  int64_t centroids = 0;  // vectors of d: centroids, page bounds
  int64_t codes = 0;      // key codes
  int64_t means = 0;      // finest clusters whose mean value the keys of `by_code` need

  std::span<const ClusterWeight> weights() const {
    return weight_room.first(static_cast<size_t>(weight_count));
  }
  // The room stays.
  void clear() {
    read.clear();
    clusters.clear();
    by_code.clear();
    weight_count = exact_skipped = centroids = codes = means = 0;
  }
};

}  // namespace sqz
