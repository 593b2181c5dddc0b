#include "training/cpu_kernel.h"

namespace sqz::training {

namespace base {
void attend_rows(const RowsTask& task);
}
#ifdef SQZ_X86_KERNELS
namespace avx2 {
void attend_rows(const RowsTask& task);
}
namespace avx512 {
void attend_rows(const RowsTask& task);
}
#endif

int64_t workspace_floats(int64_t dim) {
  constexpr int64_t kRows = kMaxRows + 12;  // rows are padded to the register tile
  return kRows * (dim + kKeyBlock + padded_dim(dim) + 2);
}

const CpuKernel& cpu_kernel(int widest) {
  static constexpr CpuKernel kBase{"base", base::attend_rows};
#ifdef SQZ_X86_KERNELS
  static constexpr CpuKernel kAvx2{"avx2", avx2::attend_rows};
  static constexpr CpuKernel kAvx512{"avx512", avx512::attend_rows};
  if (widest >= 512 && __builtin_cpu_supports("avx512f")) return kAvx512;
  if (widest >= 256 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return kAvx2;
  }
#else
  (void)widest;
#endif
  return kBase;
}

}  // namespace sqz::training
