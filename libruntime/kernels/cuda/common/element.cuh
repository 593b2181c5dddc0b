// 16-bit elements as the tensor cores take them, in pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "formats/base/dtype.h"
#include "libruntime/kernels/cuda/ptx/mma.cuh"

namespace sqz::cuda {

struct Bf16 {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
  }
  static __device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_m16n8k16(d, a, b0, b1);
  }
};

struct F16 {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float low(uint32_t pair) {
    return __low2float(reinterpret_cast<const __half2&>(pair));
  }
  static __device__ __forceinline__ float high(uint32_t pair) {
    return __high2float(reinterpret_cast<const __half2&>(pair));
  }
  static __device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};

template <class T>
using ElementOf = std::conditional_t<std::is_same_v<T, __half>, F16, Bf16>;

// a = high + low, each of 16 bits: twice the bits of one.
template <class Element>
__device__ __forceinline__ void split(float a0, float a1, uint32_t& high, uint32_t& low) {
  high = Element::pack(a0, a1);
  low = Element::pack(a0 - Element::low(high), a1 - Element::high(high));
}

// Number `at` of an array of F32, F16 or BF16.
__device__ __forceinline__ float load_1(DType dtype, const void* from, int64_t at) {
  if (dtype == DType::kF32) return static_cast<const float*>(from)[at];
  if (dtype == DType::kBF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
  return __half2float(static_cast<const __half*>(from)[at]);
}

// The largest finite number of F16 or BF16 in place of anything beyond it; a NaN stays.
__device__ __forceinline__ float saturated(DType dtype, float x) {
  const float most = dtype == DType::kBF16 ? 0x1.fep127f : 65504.0f;
  return x > most ? most : x < -most ? -most : x;
}
// A logit that overflowed to -infinity has no weight and would go unseen: it becomes NaN.
__device__ __forceinline__ float sound(float logit) {
  return logit > -INFINITY ? logit : NAN;
}

__device__ __forceinline__ void store_1(DType dtype, void* to, int64_t at, float value) {
  if (dtype != DType::kF32) value = saturated(dtype, value);
  if (dtype == DType::kF32) {
    static_cast<float*>(to)[at] = value;
  } else if (dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(to)[at] = __float2half_rn(value);
  }
}

// Eight numbers of an array of F32, F16 or BF16, from element `at`, a multiple of 8.
__device__ __forceinline__ void load_8(DType dtype, const void* from, int64_t at, float (&out)[8]) {
  if (dtype == DType::kF32) {
    const auto* data = reinterpret_cast<const float*>(from) + at;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = data[i];
    return;
  }
  const auto* data = reinterpret_cast<const uint32_t*>(static_cast<const char*>(from) + 2 * at);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = data[i];
    const bool bf16 = dtype == DType::kBF16;
    out[2 * i] = bf16 ? Bf16::low(pair) : F16::low(pair);
    out[2 * i + 1] = bf16 ? Bf16::high(pair) : F16::high(pair);
  }
}

// Two numbers, at an even element.
__device__ __forceinline__ void store_2(DType dtype, float a, float b, void* to, int64_t at) {
  if (dtype == DType::kF32) {
    static_cast<float*>(to)[at] = a;
    static_cast<float*>(to)[at + 1] = b;
    return;
  }
  a = saturated(dtype, a);
  b = saturated(dtype, b);
  static_cast<uint32_t*>(to)[at / 2] = dtype == DType::kBF16 ? Bf16::pack(a, b) : F16::pack(a, b);
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_stream(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint2 load_stream_8(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from));
  return v;
}
// The same of bytes that are read again soon.
__device__ __forceinline__ uint4 load_kept(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

}  // namespace sqz::cuda
