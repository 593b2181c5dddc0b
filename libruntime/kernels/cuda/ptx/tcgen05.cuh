// tcgen05.*: matrix products of compute capability 10.0. One thread starts a product of operands in
// shared memory; its results lie in tensor memory, 128 lanes of 512 columns of 32 bits. A warp
// reaches the 32 lanes from 32 (warp % 4) on. An address is lane << 16 | column.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda::ptx {

// Columns [*address, *address + columns) are this block's: a power of two from 32 on. One warp, all
// lanes; the same one gives them back.
__device__ __forceinline__ void tcgen05_alloc(uint32_t* address, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   shared_address(address)),
               "r"(columns)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address),
               "r"(columns));
}

// An operand in shared memory, K-major, with rows of kRowBytes (64 or 128) that are swizzled over
// their own length; groups of eight rows follow each other.
template <int kRowBytes>
__device__ __forceinline__ uint64_t tcgen05_matrix_descriptor(uint32_t address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 2 : 4, kVersion = 1;
  constexpr uint64_t kGroupBytes = 8 * kRowBytes;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 |
         (kGroupBytes >> 4) << 32 | kVersion << 46 | kSwizzle << 61;
}

// Of products of bf16 with sums in fp32: kRows of the first operand times kColumns of the second.
template <int kRows, int kColumns>
inline constexpr uint32_t kTcgen05Bf16 =
    1u << 4 | 1u << 7 | 1u << 10 | (kColumns / 8u) << 17 | (kRows / 16u) << 24;

// Starts result = a b, or result += a b if `keep`; 16 elements of K. One thread.
__device__ __forceinline__ void tcgen05_mma_f16(uint32_t result, uint64_t a, uint64_t b,
                                                uint32_t kind, bool keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(result),
      "l"(a), "l"(b), "r"(kind), "r"(static_cast<uint32_t>(keep))
      : "memory");
}

// Arrives at the barrier when the products that this thread has started are done.
__device__ __forceinline__ void tcgen05_commit(uint64_t* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// 16 lanes of 32 columns as mma lays results out: of columns 8 j to 8 j + 7, lane 4 r + t has
// 2 t, + 1 of row r in out[4 j], [4 j + 1], and of row r + 8 in [4 j + 2], [4 j + 3].
__device__ __forceinline__ void tcgen05_ld_16x256b_x4(uint32_t address, float* out) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3]), "=f"(out[4]), "=f"(out[5]),
        "=f"(out[6]), "=f"(out[7]), "=f"(out[8]), "=f"(out[9]), "=f"(out[10]), "=f"(out[11]),
        "=f"(out[12]), "=f"(out[13]), "=f"(out[14]), "=f"(out[15])
      : "r"(address));
}
__device__ __forceinline__ void tcgen05_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// Between accesses of tensor memory and a barrier by which threads order them.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

}  // namespace sqz::cuda::ptx
