// How a wave of attention is cut into parts. Constants, because the cut must not depend on the
// machine: the same bits for any number of threads.
#pragma once

#include <cstdint>

namespace sqz {

inline constexpr int64_t kTargetParts = 256;  // enough for the cores of a large host
inline constexpr int64_t kLeastKeys = 1024;  // of a part: below, the merge costs more than it gains
inline constexpr int64_t kKeyStep = 512;     // parts end on whole softmax steps
// Parts of an item of n keys: ceil(n / L), where L >= (sum of n) / kTargetParts. An item with more
// than one part has n > L, hence fewer than 2 n / L parts: at most this many in all.
inline constexpr int64_t kMostSlots = 2 * kTargetParts;

}  // namespace sqz
