// A stage of a ring in shared memory and the parity of its current round.
#pragma once

#include <cstdint>

namespace sqz::cuda {

template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace sqz::cuda
