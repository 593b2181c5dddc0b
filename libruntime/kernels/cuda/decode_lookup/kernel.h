// Lookup for decoding: one query token a request against the centroids of an index, level by level,
// or against the bounds of its pages; the selected runs of every (request, KV head). The scores are
// those of libruntime/select/score.h and quest.cc, the rules those of libruntime/select/rule.h.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "libruntime/kernels/cuda/common/run_lists.h"

namespace sqz::cuda {

inline constexpr int kMostGroup = 8;  // query heads of a KV head
inline constexpr int kMostLevels = 4;
inline constexpr int kMostTeam = 16;        // blocks of a team: they share a pair
inline constexpr int kExchangeWords = 256;  // that a block tells its team at once

enum class LookupRule : int32_t { kThreshold, kBudget, kTop };

struct LookupLevel {
  const void* centroids = nullptr;    // [Hkv, n, d]; of pages: their least keys
  const void* greatest = nullptr;     // of pages: [Hkv, n, d]
  const uint32_t* offsets = nullptr;  // [Hkv, n + 1]
  const uint32_t* sizes = nullptr;    // [Hkv, n]; null (pages): all 1
  const float* log_sizes = nullptr;   // [Hkv, n]
  int32_t clusters = 0;               // n
  float threshold = 0;                // log2 T
};

struct LookupParams {
  const void* q = nullptr;  // [requests, Hq, d] of q_dtype
  DType q_dtype = DType::kBF16;
  DType dtype = DType::kBF16;  // of centroids: BF16 or F16
  int32_t dim = 0;             // 64, 96, 128 or 256
  int32_t requests = 0, kv_heads = 0, group = 0;
  float scale = 0;   // attention scale * log2(e)
  bool mean = true;  // over the group; else the maximum
  bool pages = false;
  bool hopper = false;  // the GPU has clusters and programmatic launches
  LookupRule rule = LookupRule::kThreshold;
  const uint32_t* wanted = nullptr;  // [Hkv] keys (kBudget) or pages (kTop)
  int32_t levels = 1;
  LookupLevel level[kMostLevels];
  uint32_t slots = 0;  // M

  // Workspace; width: at least every n.
  int64_t width = 0;
  float* logits = nullptr;    // [pairs, group, width], used where shared memory is too small
  uint32_t* alive = nullptr;  // [pairs, 2, width]
  RunLists lists;
  unsigned long long* counters = nullptr;  // {selections, keys, centroids} are added to
};

// How many blocks a GPU can gather to a team, for this dim, dtype and kind: 1 before Hopper.
Result<int> most_team(const LookupParams& params, int device);

// Each pair is served by a team of `team` blocks, a power of two up to most_team().
// kUnsupported for a dim or group that there is no kernel for.
Status decode_lookup(const LookupParams& params, int team, cudaStream_t stream);

}  // namespace sqz::cuda
