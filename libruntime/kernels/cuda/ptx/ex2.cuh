// ex2.approx: 2^x.
#pragma once

namespace sqz::cuda::ptx {

__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace sqz::cuda::ptx
