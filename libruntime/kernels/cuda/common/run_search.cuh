// From a key of a list to its run.
#pragma once

#include <cstdint>

namespace sqz::cuda {

// The last of `count` runs that begins at or before a key of their list; 0 of none. `before`: as in
// RunLists. By all lanes of a warp: they look at 32 runs at once, because each look waits for
// memory.
__device__ __forceinline__ uint32_t run_of(const uint32_t* before, uint32_t count, uint32_t key) {
  uint32_t low = 0;
  while (count > 1) {
    const uint32_t step = (count + 31) / 32, own = step * (threadIdx.x & 31);
    const bool is = own < count && before[low + own] <= key;
    const uint32_t last = 31 - __clz(__ballot_sync(~0u, is) | 1u);
    low += step * last;
    count = min(step, count - step * last);
  }
  return low;
}

}  // namespace sqz::cuda
