#include <cfloat>
#include <cmath>

#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/decode/lookup/choice.cuh"
#include "libruntime/kernels/cuda/prefill/common/sm80_tile.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
// Of a choice. A thread has clusters that follow each other: the fewer, the fewer lines of memory
// a load of a warp touches.
constexpr int kChooseThreads = 1024;

// The sums of a pair's rows over their parts.
__global__ void __launch_bounds__(kThreads)
    sm80_lse_kernel(const __grid_constant__ Sm80Lookup call) {
  const LookupParams& p = call.token;
  const int pair = static_cast<int>(blockIdx.x), head = pair % p.kv_heads;
  const int2 block = block_of(call.blocks, pair / p.kv_heads);
#pragma unroll 1
  for (int r = threadIdx.x; r < block.y * p.group; r += kThreads) {
    const int64_t token = block.x + r / p.group;
    const int64_t row = (token * p.kv_heads + head) * p.group + r % p.group;
    float maximum = kLowestLogit, sum = 0;
    for (int part = 0; part < kSm80Parts; ++part) {
      const float2 own = call.sums[row * kSm80Parts + part];
      add_sums(maximum, sum, own.x, own.y);
    }
    // Nothing alive: no logit will be compared with it.
    const float lse = sum == 0 ? 0 : maximum + log2f(sum);
    call.lse[row] = lse;
    if (!(fabsf(lse) <= FLT_MAX)) call.faults[pair] = 1;
  }
}

// A block of threads a pair: a team of one.
using Sm80Team = PullTeam<kChooseThreads>;
struct Sm80Shared {
  Sm80Team::Shared team;
  CutoffShared cutoff;
};
class Sm80Choice : private Choice<Sm80Team, false> {
 public:
  __device__ Sm80Choice(const Sm80Lookup& call, const LookupParams& params, Sm80Shared& shared)
      : Choice(params, 1, static_cast<int>(blockIdx.x), shared.team,
               reinterpret_cast<char*>(&shared.cutoff)),
        call_(call) {}

  __device__ void run(int k) {
    const LookupLevel& level = p_.level[k];
    const uint2 state = k == 0 ? make_uint2(level.clusters, 0) : call_.state[pair_];
    if (call_.faults[pair_] != 0) {
      if (thread_ == 0) {
        end_with_fault(p_, pair_);
        call_.state[pair_] = make_uint2(0, 0);
      }
      return;
    }
    const auto alive_at = [&](int of) {
      return p_.alive + (static_cast<int64_t>(pair_) * 2 + of % 2) * p_.width;
    };
    const uint32_t* alive = k == 0 ? nullptr : alive_at(k - 1);
    words_ = call_.chosen + pair_ * p_.width;
    size_ = state.x;
    // Of buckets nothing counts: networks are the model's.
    const uint32_t vectors = level.centroids == nullptr ? 0 : p_.pages ? 2 : 1;
    centroids_ = state.y + state.x * vectors;
    const bool finest = k + 1 == p_.levels;
    clear_bins();
    __syncthreads();
    const float* scores = call_.scores + pair_ * p_.width + thread_ * each();
    const Chosen chosen = choose(
        p_.rule, level, alive, finest, p_.rule == LookupRule::kThreshold ? 0 : p_.wanted[head_],
        // Bounds of pages and shares of buckets have no threshold beside them.
        level.log_sizes == nullptr ? Window::everything() : Window::around(level.threshold),
        [&] {
          Chosen passed = none();
          for (uint32_t i = 0; i < own_count(); ++i) {
            passed.set(i, scores[i] >= level.threshold && scores[i] > -INFINITY);
          }
          return passed;
        },
        [] {}, [&](uint32_t i) { return scores[i]; });
    if (finest) return emit(chosen, level, alive);
    const uint32_t count = list_children(chosen, level, alive, alive_at(k));
    if (thread_ == 0) call_.state[pair_] = make_uint2(count, centroids_);
  }

 private:
  const Sm80Lookup& call_;
};

__global__ void __launch_bounds__(kChooseThreads)
    sm80_choose_kernel(const __grid_constant__ Sm80Lookup call, int level) {
  __shared__ Sm80Shared shared;
  const int tokens = block_of(call.blocks, static_cast<int>(blockIdx.x) / call.token.kv_heads).y;
  Sm80Choice(call, tokens > 1 ? call.block : call.token, shared).run(level);
}

}  // namespace

Status sm80_lse(const Sm80Lookup& call, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(call.blocks.count * call.token.kv_heads);
  return launch_blocks(sm80_lse_kernel, pairs, kThreads, 0, Device(), stream, call);
}

Status sm80_choose(const Sm80Lookup& call, int level, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(call.blocks.count * call.token.kv_heads);
  return launch_blocks(sm80_choose_kernel, pairs, kChooseThreads, 0, Device(), stream, call, level);
}

}  // namespace sqz::cuda
