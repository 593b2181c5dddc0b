// The answer of a selector (select/): what attention (attention/) reads of one KV head for one
// block of query tokens.
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

struct HeadSelection {
  RunList<KeyRun> read;       // slots
  int64_t exact_skipped = 0;  // first exact keys that are not read
  int64_t centroids = 0;      // vectors of d that were read to decide: centroids, page bounds

  // The room stays.
  void clear() {
    read.clear();
    exact_skipped = centroids = 0;
  }
};

}  // namespace sqz
