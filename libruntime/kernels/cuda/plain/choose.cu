#include <cfloat>
#include <cmath>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode_lookup/rules.cuh"
#include "libruntime/kernels/cuda/plain/kernel.h"
#include "libruntime/kernels/cuda/plain/tiles.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;

// The sums of a pair's rows over their parts.
__global__ void __launch_bounds__(kThreads)
    plain_lse_kernel(const __grid_constant__ PlainLookup call) {
  const LookupParams& p = call.token;
  const int pair = static_cast<int>(blockIdx.x), head = pair % p.kv_heads;
  const int2 block = block_of(call.blocks, pair / p.kv_heads);
#pragma unroll 1
  for (int r = threadIdx.x; r < block.y * p.group; r += kThreads) {
    const int64_t token = block.x + r / p.group;
    const int64_t row = (token * p.kv_heads + head) * p.group + r % p.group;
    float maximum = kLowestLogit, sum = 0;
    for (int part = 0; part < kPlainParts; ++part) {
      const float2 own = call.sums[row * kPlainParts + part];
      add_sums(maximum, sum, own.x, own.y);
    }
    // Nothing alive: no logit will be compared with it.
    const float lse = sum == 0 ? 0 : maximum + log2f(sum);
    call.lse[row] = lse;
    if (!(fabsf(lse) <= FLT_MAX)) call.faults[pair] = 1;
  }
}

// A block of threads a pair: a team of one.
class PlainChoice : private LookupRules {
 public:
  __device__ PlainChoice(const PlainLookup& call, const LookupParams& params, RulesShared& shared)
      : LookupRules(params, 1, static_cast<int>(blockIdx.x), shared), call_(call) {}

  __device__ void run(int k) {
    const LookupLevel& level = p_.level[k];
    const uint2 state = k == 0 ? make_uint2(level.clusters, 0) : call_.state[pair_];
    if (call_.faults[pair_] != 0) {
      if (thread_ == 0) {
        end_with_fault(p_, pair_);
        if (call_.estimates.list != nullptr) call_.estimates.counts[pair_] = 0;
        call_.state[pair_] = make_uint2(0, 0);
      }
      return;
    }
    const auto alive_at = [&](int of) {
      return p_.alive + (static_cast<int64_t>(pair_) * 2 + of % 2) * p_.width;
    };
    const uint32_t* alive = k == 0 ? nullptr : alive_at(k - 1);
    scores_ = call_.scores + pair_ * p_.width;
    end_ = state.x;
    // Of buckets nothing counts: networks are the model's.
    const uint32_t vectors = level.centroids == nullptr ? 0 : p_.pages ? 2 : 1;
    centroids_ = state.y + state.x * vectors;
    const bool finest = k + 1 == p_.levels;
    choose(level, alive, finest);
    const uint32_t estimated = call_.estimates.list == nullptr ? 0 : list_estimated(k, alive);
    if (finest) {
      centroids_ += estimated;  // their mean values
      emit(level, alive);
      return;
    }
    const uint32_t count = list_children(level, alive, alive_at(k));
    if (thread_ == 0) call_.state[pair_] = make_uint2(count, centroids_);
  }

 private:
  // What is not empty and was not chosen, after those of the levels before; how many.
  __device__ uint32_t list_estimated(int k, const uint32_t* alive) {
    uint32_t* list = call_.estimates.list + pair_ * call_.estimates.capacity;
    uint32_t before = k == 0 ? 0 : call_.estimates.counts[pair_];
#pragma unroll 1
    for (uint32_t tile = 0; tile < end_; tile += kLookupThreads) {
      const uint32_t j = tile + thread_;
      const uint32_t cluster = j < end_ ? cluster_of(alive, j) : 0;
      const bool is =
          j < end_ && !(scores_[j] > -INFINITY) && size_of(p_.level[k], head_, cluster) > 0;
      Sums all;
      const uint32_t at = before + sums_before({is ? 1u : 0u, 0}, all).a;
      before += all.a;
      if (is) list[at] = static_cast<uint32_t>(k) << kLevelShift | cluster;
    }
    __syncthreads();
    if (thread_ == 0) call_.estimates.counts[pair_] = before;
    return before;
  }

  const PlainLookup& call_;
};

__global__ void __launch_bounds__(kLookupThreads)
    plain_choose_kernel(const __grid_constant__ PlainLookup call, int level) {
  __shared__ RulesShared shared;
  const int tokens = block_of(call.blocks, static_cast<int>(blockIdx.x) / call.token.kv_heads).y;
  PlainChoice(call, tokens > 1 ? call.block : call.token, shared).run(level);
}

}  // namespace

Status plain_lse(const PlainLookup& call, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(call.blocks.count * call.token.kv_heads);
  return launch_blocks(plain_lse_kernel, pairs, kThreads, 0, Device(), stream, call);
}

Status plain_choose(const PlainLookup& call, int level, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(call.blocks.count * call.token.kv_heads);
  return launch_blocks(plain_choose_kernel, pairs, kLookupThreads, 0, Device(), stream, call,
                       level);
}

}  // namespace sqz::cuda
