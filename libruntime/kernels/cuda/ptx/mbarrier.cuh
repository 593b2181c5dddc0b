// mbarrier.*: barriers in shared memory that count arrivals and transferred bytes.
#pragma once

#include <cstdint>

namespace sqz::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// A warp's arrivals where it hands over what all of its lanes have read or written: one, after
// __syncwarp(). compute-sanitizer's racecheck does not follow that order from lane to lane; built
// with SQZ_EVERY_LANE_ARRIVES it has no need to.
#ifdef SQZ_EVERY_LANE_ARRIVES
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

__device__ __forceinline__ void mbarrier_arrive_warp(uint64_t* barrier) {
  __syncwarp();
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Returns once the phase of this parity is over. Without NDEBUG a wait of some seconds, which only
// a lost arrival explains, ends the kernel with an error.
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
#ifdef NDEBUG
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\n"
      "bra again_%=;\n"
      "over_%=:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#else
  constexpr long long kMostClocks = 10'000'000'000;
  const long long start = clock64();
  for (uint32_t done = 0; done == 0;) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    if (clock64() - start > kMostClocks) __trap();
  }
#endif
}

}  // namespace sqz::cuda::ptx
