// How a chunk of attention is cut into splits. Constants, because the cut must not depend on the
// machine: the same bits for any number of threads.
#pragma once

#include <cstdint>

namespace sqz {

inline constexpr int64_t kTargetSplits = 256;  // enough for the cores of a large host
inline constexpr int64_t kLeastKeys =
    1024;                                 // of a split: below, the merge costs more than it gains
inline constexpr int64_t kKeyStep = 512;  // splits end on whole softmax steps
// Splits of an item of n keys: ceil(n / L), where L >= (sum of n) / kTargetSplits. An item with
// more than one split has n > L, hence fewer than 2 n / L splits: at most this many in all.
inline constexpr int64_t kMostSlots = 2 * kTargetSplits;

}  // namespace sqz
