// wgmma.mma_async m64nNk16: bf16 or f16 in, fp32 accumulators. A is a descriptor (K-major) or four
// registers a thread; B is a descriptor, K-major or, transposed, with its N dimension contiguous.
// `keep` = 0 overwrites the accumulators, otherwise adds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "libruntime/kernels/cuda/ptx/wgmma.cuh"

namespace sqz::cuda::ptx {

// WgmmaProduct<T, N>::multiply<kTransposeB>(d, a, b, keep)
template <class T, int N>
struct WgmmaProduct;

// clang-format off
#define SQZ_NAMES0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SQZ_NAMES1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define SQZ_NAMES2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define SQZ_NAMES3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define SQZ_NAMES4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SQZ_NAMES5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define SQZ_NAMES6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define SQZ_NAMES7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define SQZ_NAMES8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define SQZ_NAMES9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define SQZ_NAMES10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define SQZ_NAMES11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define SQZ_NAMES12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define SQZ_NAMES13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define SQZ_NAMES14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define SQZ_NAMES15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define SQZ_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
  "+f"(d[i + 6]), "+f"(d[i + 7])
// R0 to R6: operand numbers after the N / 2 accumulators, as strings.
#define SQZ_WGMMA_PRODUCT(T, TYPE, N, NAMES, ACCUMULATORS, R0, R1, R2, R3, R4, R5, R6)              \
  template <>                                                                                      \
  struct WgmmaProduct<T, N> {                                                                      \
    template <int kTransposeB>                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4],     \
                                                    uint64_t b, int keep) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R5 ", 0;\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES        \
                   "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " R4 ", p, 1, 1, " R6 ";\n}"                \
                   : ACCUMULATORS                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep),                 \
                     "n"(kTransposeB));                                                            \
    }                                                                                              \
    template <int kTransposeB>                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b,     \
                                                    int keep) {                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R2 ", 0;\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES        \
                   "}, " R0 ", " R1 ", p, 1, 1, 0, " R3 ";\n}"                                       \
                   : ACCUMULATORS                                                                  \
                   : "l"(a), "l"(b), "r"(keep), "n"(kTransposeB));                                 \
    }                                                                                              \
  };
#define SQZ_UNPACK(...) __VA_ARGS__
#define SQZ_WGMMA_PRODUCT_OF(N, ...)                                                                     \
  SQZ_WGMMA_PRODUCT(__nv_bfloat16, "bf16", N, SQZ_NAMES_##N, SQZ_UNPACK(SQZ_D_##N), __VA_ARGS__)         \
  SQZ_WGMMA_PRODUCT(__half, "f16", N, SQZ_NAMES_##N, SQZ_UNPACK(SQZ_D_##N), __VA_ARGS__)

#define SQZ_NAMES_64 SQZ_NAMES0 ", " SQZ_NAMES1 ", " SQZ_NAMES2 ", " SQZ_NAMES3
#define SQZ_D_64 SQZ_D8(0), SQZ_D8(8), SQZ_D8(16), SQZ_D8(24)
#define SQZ_NAMES_80 SQZ_NAMES_64 ", " SQZ_NAMES4
#define SQZ_D_80 SQZ_D_64, SQZ_D8(32)
#define SQZ_NAMES_96 SQZ_NAMES_80 ", " SQZ_NAMES5
#define SQZ_D_96 SQZ_D_80, SQZ_D8(40)
#define SQZ_NAMES_112 SQZ_NAMES_96 ", " SQZ_NAMES6
#define SQZ_D_112 SQZ_D_96, SQZ_D8(48)
#define SQZ_NAMES_120 SQZ_NAMES_112 ", %56, %57, %58, %59"
#define SQZ_D_120 SQZ_D_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define SQZ_NAMES_128 SQZ_NAMES_112 ", " SQZ_NAMES7
#define SQZ_D_128 SQZ_D_112, SQZ_D8(56)
#define SQZ_NAMES_176 SQZ_NAMES_128 ", " SQZ_NAMES8 ", " SQZ_NAMES9 ", " SQZ_NAMES10
#define SQZ_D_176 SQZ_D_128, SQZ_D8(64), SQZ_D8(72), SQZ_D8(80)
#define SQZ_NAMES_256 SQZ_NAMES_176 ", " SQZ_NAMES11 ", " SQZ_NAMES12 ", " SQZ_NAMES13 ", " SQZ_NAMES14 ", " SQZ_NAMES15
#define SQZ_D_256 SQZ_D_176, SQZ_D8(88), SQZ_D8(96), SQZ_D8(104), SQZ_D8(112), SQZ_D8(120)

SQZ_WGMMA_PRODUCT_OF(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
SQZ_WGMMA_PRODUCT_OF(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
SQZ_WGMMA_PRODUCT_OF(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
SQZ_WGMMA_PRODUCT_OF(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
SQZ_WGMMA_PRODUCT_OF(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
SQZ_WGMMA_PRODUCT_OF(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
SQZ_WGMMA_PRODUCT_OF(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
SQZ_WGMMA_PRODUCT_OF(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// clang-format on

}  // namespace sqz::cuda::ptx
