// Runs of slots, put together in ascending order.
#pragma once

#include "libruntime/select/selector.h"

namespace sqz {

inline void clear(HeadSelection& out) {
  out.run_count = out.estimated_count = out.keys = 0;
  out.estimated_clusters = out.centroids = out.exact_skipped = 0;
}

// Slots [first, end), which begin at or after the end of the last run. A run that begins where the
// last one ends becomes part of it; an empty one, between two chosen ones, separates nothing.
inline void append_run(HeadSelection& out, uint32_t first, uint32_t end) {
  if (first == end) return;
  out.keys += end - first;
  KeyRun* last = out.run_count > 0 ? &out.runs[out.run_count - 1] : nullptr;
  if (last != nullptr && last->first + last->length == first) {
    last->length += end - first;
  } else {
    out.runs[out.run_count++] = {first, end - first};
  }
}

}  // namespace sqz
