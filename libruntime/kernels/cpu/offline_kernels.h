// The CPU's inner loops of work that serves no queries: assigning keys to centroids (libindex) and
// the dense pass of a model (training). Compiled and chosen as CpuKernels is.
#pragma once

#include <cstdint>
#include <span>

namespace sqz {

struct CausalTask;

inline constexpr int64_t kPanel = 64;  // centroids of a panel, see `nearest`

struct OfflineKernels {
  const char* name;  // "baseline", "avx2", "avx512"

  // The centroid with the largest product x[i] . c, the lowest number among equals: products[i],
  // labels[i]. x [n][dim]; panels: centroids in panels of kPanel, [ceil(clusters / kPanel)][dim]
  // [kPanel], the last one filled up with copies of its last centroid, which never win. Each
  // product is one chain of fused multiply-adds over dim, on all instruction sets that have them:
  // the same bits. clusters < 2^31.
  void (*nearest)(const float* x, int64_t n, int64_t dim, const float* panels, int64_t clusters,
                  float* products, int64_t* labels);

  // See causal.h.
  void (*attend_causal)(const CausalTask& task);
};

// The best table for this machine.
const OfflineKernels& offline_kernels();
// All tables that this machine can run, slowest first. For tests.
std::span<const OfflineKernels* const> available_offline_kernels();

}  // namespace sqz
