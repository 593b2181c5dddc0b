// Compiles the -inl.h files once per instruction set (this file includes itself through
// foreach_target.h) and chooses among them. Highway's own choice, and its checks in debug builds,
// would need libhwy; libsqz depends on nothing.
#define HWY_IS_DEBUG_BUILD 0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "libruntime/kernels/cpu/kernels.cc"

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/offline_kernels.h"

// Left on x86: EMU128 (what every x86-64 runs), AVX2, AVX3.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

// clang-format off: foreach_target.h must come first
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "libruntime/kernels/cpu/causal-inl.h"
#include "libruntime/kernels/cpu/load-inl.h"
#include "libruntime/kernels/cpu/softmax-inl.h"
#include "libruntime/kernels/cpu/stream-inl.h"
#include "libruntime/kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {

const CpuKernels& table(const char* name) {
  static_assert(kLanePad % kLanes == 0 && kTileRows % kLanePad == 0);
  static const CpuKernels kTable = {.name = name,
                                    .pack = pack,
                                    .unpack = unpack,
                                    .dots = dots,
                                    .accumulate = accumulate,
                                    .softmax_row = softmax_row,
                                    .scale = scale,
                                    .to_float = to_float,
                                    .multiply = multiply,
                                    .softmax_lanes = softmax_lanes,
                                    .scale_lanes = scale_lanes,
                                    .log_sum_exp = log_sum_exp,
                                    .add_rows = add_rows,
                                    .finish_mean = finish_mean,
                                    .page_bounds = page_bounds};
  return kTable;
}

const OfflineKernels& offline_table(const char* name) {
  static const OfflineKernels kTable = {
      .name = name, .nearest = nearest, .attend_causal = attend_causal};
  return kTable;
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

#include <array>

#include "libruntime/kernels/cpu/dots_avx512.h"

namespace sqz {
namespace {

struct Tables {
  std::array<const CpuKernels*, 5> all{};
  std::array<const OfflineKernels*, 3> offline{};
  size_t count = 0, offline_count = 0;
  void add(const CpuKernels& kernels) { all[count++] = &kernels; }
  void add(const CpuKernels& kernels, const OfflineKernels& beside) {
    add(kernels);
    offline[offline_count++] = &beside;
  }
};

#if HWY_ARCH_X86
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

Tables find_tables() {
  Tables tables;
  tables.add(HWY_STATIC_DISPATCH(table)("baseline"),
             HWY_STATIC_DISPATCH(offline_table)("baseline"));
#if HWY_TARGETS & HWY_AVX2 & ~HWY_STATIC_TARGET
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_f16c();
  if (!avx2) return tables;
  tables.add(N_AVX2::table("avx2"), N_AVX2::offline_table("avx2"));
#endif
#if HWY_TARGETS & HWY_AVX3 & ~HWY_STATIC_TARGET
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  if (!avx512) return tables;
  tables.add(N_AVX3::table("avx512"), N_AVX3::offline_table("avx512"));
  static const CpuKernels kWithVnni = [] {
    CpuKernels kernels = N_AVX3::table("avx512");
    kernels.name = "avx512_vnni";
    kernels.pack_i16 = pack_i16;
    kernels.dots_i16 = dots_i16;
    return kernels;
  }();
  if (!__builtin_cpu_supports("avx512vnni")) return tables;
  tables.add(kWithVnni);
  static const CpuKernels kWithBf16 = [] {
    CpuKernels kernels = kWithVnni;
    kernels.name = "avx512_bf16";
    kernels.pack_bf16 = pack_bf16;
    kernels.dots_bf16 = dots_bf16;
    kernels.pair_bf16 = pair_bf16;
    kernels.tile_bf16 = tile_bf16;
    return kernels;
  }();
  if (__builtin_cpu_supports("avx512bf16")) tables.add(kWithBf16);
#endif
  return tables;
}
#else
Tables find_tables() {
  Tables tables;
  tables.add(HWY_STATIC_DISPATCH(table)("baseline"),
             HWY_STATIC_DISPATCH(offline_table)("baseline"));
  return tables;
}
#endif

const Tables& tables() {
  static const Tables kTables = find_tables();
  return kTables;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  return *tables().all[tables().count - 1];
}

std::span<const CpuKernels* const> available_cpu_kernels() {
  return {tables().all.data(), tables().count};
}

const OfflineKernels& offline_kernels() {
  return *tables().offline[tables().offline_count - 1];
}

std::span<const OfflineKernels* const> available_offline_kernels() {
  return {tables().offline.data(), tables().offline_count};
}

}  // namespace sqz
#endif  // HWY_ONCE
