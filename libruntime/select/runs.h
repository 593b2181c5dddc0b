// Runs of slots, put together in ascending order.
#pragma once

#include <vector>

#include "libruntime/select/selector.h"

namespace sqz {

inline void clear(HeadSelection& out) {
  out.run_count = out.estimated_count = out.keys = 0;
  out.estimated_clusters = out.centroids = out.exact_skipped = 0;
  out.rest_count = out.guessed_count = out.guessed_keys = out.codes = out.means = 0;
}

inline bool touch(const KeyRun& run, const KeyRun& next) {
  return run.first + run.length == next.first;
}
inline bool touch(const ClusterRun& run, const ClusterRun& next) {
  return run.level == next.level && run.first + run.length == next.first;
}

// Appends to the first `count` of a list with room; a run that touches the last one goes on with
// it.
template <class Run>
void append_run(std::span<Run> runs, int64_t& count, const Run& next) {
  if (count > 0 && touch(runs[count - 1], next)) {
    runs[count - 1].length += next.length;
  } else {
    runs[count++] = next;
  }
}
// Slots [first, end), which begin at or after the end of the last run. An empty run, between two
// chosen ones, separates nothing.
inline void append_run(HeadSelection& out, uint32_t first, uint32_t end) {
  if (first == end) return;
  out.keys += end - first;
  append_run(out.runs, out.run_count, KeyRun{first, end - first});
}
inline void append_guessed(HeadSelection& out, uint32_t first, uint32_t end) {
  if (first == end) return;
  out.guessed_keys += end - first;
  append_run(out.guessed, out.guessed_count, KeyRun{first, end - first});
}

// The same for a list that grows.
template <class Run>
void extend(std::vector<Run>& runs, const Run& next) {
  if (!runs.empty() && touch(runs.back(), next)) {
    runs.back().length += next.length;
  } else {
    runs.push_back(next);
  }
}

}  // namespace sqz
