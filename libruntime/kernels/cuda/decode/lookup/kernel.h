// Lookup for decoding: one query token a request against the centroids of an index, level by level;
// the selected runs of every (request, KV head). The scores are those of libruntime/select/score.h,
// the rules those of libruntime/select/rule.h. It needs thread block clusters, which GPUs have from
// compute capability 9.0 on. prefill_lookup() serves elsewhere, and for what does not fit.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/common/run_lists.h"
#include "libruntime/kernels/cuda/decode/named_contexts.h"

namespace sqz::cuda {

inline constexpr int kMostLevels = 4;
inline constexpr int kMostTeam = 16;  // blocks of a team: they share a pair

enum class LookupRule : int32_t { kThreshold, kBudget };

struct LookupLevel {
  const void* centroids = nullptr;    // [Hkv, n, d]; of pages: their least keys
  const void* greatest = nullptr;     // of pages: [Hkv, n, d]
  const uint32_t* offsets = nullptr;  // [Hkv, n + 1]
  const uint32_t* sizes = nullptr;    // [Hkv, n]; null: 1 each, of pages
  const float* log_sizes = nullptr;   // [Hkv, n]
  int32_t clusters = 0;               // n
  float threshold = 0;                // log2 T
};

// The lookup in a layer of one context reads this.
struct LookupLayer {
  const uint32_t* wanted = nullptr;  // [Hkv] keys, or pages
  int32_t levels = 1;
  LookupLevel level[kMostLevels];
  uint32_t slots = 0;                      // M
  uint32_t exact = 0;                      // as RunTotals::exact
  unsigned long long* counters = nullptr;  // {selections, keys, centroids} are added to
};

struct LookupParams : LookupLayer {
  const void* q = nullptr;  // [requests, Hq, d] of q_dtype
  DType q_dtype = DType::kBF16;
  DType dtype = DType::kBF16;  // of centroids: BF16 or F16
  int32_t dim = 0;             // 64, 96, 128 or 256
  int32_t requests = 0, kv_heads = 0, group = 0;
  float scale = 0;  // attention scale * log2(e)
  Device device;
  LookupRule rule = LookupRule::kThreshold;
  // In device memory, [requests]: each request's own layer, in place of that of the parameters.
  // The kernel that makes them of `named`, in the same order, has waited for everything before it.
  // All its blocks have passed that wait when a lookup begins.
  const ContextLayer* own = nullptr;
  NamedContexts named;

  // Workspace; width: at least every n.
  int64_t width = 0;
  uint32_t* alive = nullptr;  // [pairs, 2, width]
  RunLists lists;
};

// Most runs of a pair over so many clusters of the finest level: a run ends where what a warp or a
// block of the lookup looks at ends.
inline int64_t run_capacity(int64_t width) {
  return width / 2 + width / 64 + 2 * kMostTeam;
}

// Teams of which size a GPU holds at once, for this dim, dtype, width and rule. A team that waits
// for another's end takes as long again.
struct TeamSizes {
  int teams[kMostTeam + 1] = {};  // so many of each size; 0 of one that cannot serve

  // For a call with so many pairs; 1: none.
  int of(int pairs) const {
    int team = kMostTeam;
    while (team > 1 && teams[team] < pairs) --team;
    return team;
  }
  // Returns the smallest, which serves any number of pairs in turns; 1: none.
  int least() const {
    for (int team = 2; team <= kMostTeam; ++team) {
      if (teams[team] > 0) return team;
    }
    return 1;
  }
};
Result<TeamSizes> team_sizes(const LookupParams& params);

// Each pair is served by a team of `team` blocks: of team_sizes().
// kUnsupported for a dim or group that there is no kernel for.
Status decode_lookup(const LookupParams& params, int team, cudaStream_t stream);

}  // namespace sqz::cuda
