// Teams: the thread blocks that share a pair, and sums over them. On GPUs with thread block
// clusters a team is one of these: its blocks read each other's shared memory (DSMEM) and wait at
// the cluster's barrier. Elsewhere blocks exchange words in global memory and wait for each other
// there; the launch is cooperative, so all of them run at once.
#pragma once

#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/ptx/atom.cuh"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

inline constexpr int kRadixBins = 256;  // of scores, a histogram's
static_assert(2 * kRadixBins <= kExchangeWords);
inline constexpr float kLowestLogit = -3.0e38f;  // differences stay finite

struct Sums {
  uint32_t a = 0, b = 0;
};

template <int kThreads, int kWords = 256>
struct TeamShared {
  alignas(8) uint32_t exchange[2][kWords];  // what the block sends its team, in turn
  Sums warp_sums[kThreads / 32];
};

// Of blocks of kBlockThreads.
template <int kBlockThreads, int kWords = 256>
class LookupTeam {
 public:
  static constexpr int kThreads = kBlockThreads;
  using Shared = TeamShared<kThreads, kWords>;

  // `exchange`: of all teams; null where a team is a cluster.
  __device__ LookupTeam(int team, Shared& shared, TeamExchange* exchange)
      : shared_(shared),
        exchange_(exchange == nullptr || team == 1
                      ? nullptr
                      : exchange + static_cast<int>(blockIdx.x) / team),
        team_(team),
        rank_(static_cast<int>(blockIdx.x) % team),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

 protected:
  // What was written before, to global memory too, is seen after it.
  __device__ void sync_team() {
    __syncthreads();
    if (team_ == 1) return;
    if (exchange_ == nullptr) {
      ptx::barrier_cluster();
      return;
    }
    if (thread_ == 0) {
      __threadfence();
      atomicAdd(&exchange_->arrived, 1);
      waited_for_ += team_;
      while (ptx::ld_acquire(&exchange_->arrived) < waited_for_) {
      }
      __threadfence();
    }
    __syncthreads();
  }
  // The last of a block.
  __device__ void leave_team() const {
    if (team_ == 1) return;
    if (exchange_ == nullptr) {
      ptx::barrier_cluster();  // no block leaves while another may read its shared memory
    } else if (thread_ == 0 && atomicAdd(&exchange_->left, 1) + 1 == static_cast<uint32_t>(team_)) {
      exchange_->arrived = exchange_->left = 0;
    }
  }
  // What this block sends; after sync_team(), what rank r has sent.
  __device__ uint32_t* own_words() {
    return exchange_ == nullptr ? shared_.exchange[turn_] : exchange_->words[turn_][rank_];
  }
  __device__ uint32_t received(int rank, int word) {
    if (exchange_ != nullptr) return __ldcg(&exchange_->words[turn_][rank][word]);
    if (team_ == 1) return shared_.exchange[turn_][word];
    const auto address =
        static_cast<uint32_t>(__cvta_generic_to_shared(&shared_.exchange[turn_][word]));
    return ptx::ld_shared_cluster(ptx::mapa(address, static_cast<uint32_t>(rank)));
  }

  // Sums of the threads before this one, and of the block.
  __device__ Sums sums_before(Sums own, Sums& all) {
    Sums scan = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t a = __shfl_up_sync(~0u, scan.a, step), b = __shfl_up_sync(~0u, scan.b, step);
      if (lane_ >= step) {
        scan.a += a;
        scan.b += b;
      }
    }
    __syncthreads();
    if (lane_ == 31) shared_.warp_sums[warp_] = scan;
    __syncthreads();
    Sums before = {scan.a - own.a, scan.b - own.b};
    all = {};
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp_) {
        before.a += shared_.warp_sums[w].a;
        before.b += shared_.warp_sums[w].b;
      }
      all.a += shared_.warp_sums[w].a;
      all.b += shared_.warp_sums[w].b;
    }
    return before;
  }

  // Sums of the ranks before, and of the team, from each rank's own. Lane r reads rank r's.
  __device__ Sums team_sums(Sums own, Sums& all) {
    if (team_ == 1) {
      all = own;
      return {};
    }
    if (thread_ == 0) {
      own_words()[0] = own.a;
      own_words()[1] = own.b;
    }
    sync_team();
    const uint32_t a = lane_ < team_ ? received(lane_, 0) : 0,
                   b = lane_ < team_ ? received(lane_, 1) : 0;
    Sums before;
    before.a = __reduce_add_sync(~0u, lane_ < rank_ ? a : 0);
    before.b = __reduce_add_sync(~0u, lane_ < rank_ ? b : 0);
    all.a = __reduce_add_sync(~0u, a);
    all.b = __reduce_add_sync(~0u, b);
    next_turn();
    return before;
  }

  // Of two exchange areas: a fast block must not overwrite what a slow one reads.
  __device__ void next_turn() {
    turn_ ^= 1;
  }

  Shared& shared_;
  TeamExchange* const exchange_;
  const int team_, rank_, thread_, lane_, warp_;
  int turn_ = 0;

 private:
  uint32_t waited_for_ = 0;  // thread 0: arrivals
};

// The interface of PushTeam, but members fetch what was sent, after a barrier of the team. For
// every GPU, and for a team of one.
template <int kThreads>
class PullTeam : protected LookupTeam<kThreads, kExchangeWords> {
  using Team = LookupTeam<kThreads, kExchangeWords>;

 public:
  using typename Team::Shared;
  static constexpr int64_t bin_bytes(int) { return 0; }

  __device__ PullTeam(int team, Shared& shared, TeamExchange* exchange, uint2*)
      : Team(team, shared, exchange) {}

 protected:
  __device__ void begin_team() const {}
  __device__ void await_team() const {}
  // All members read the same words: sending to the first is enough.
  __device__ void send(int rank, int item, uint32_t a, uint32_t b) {
    if (rank == 0) reinterpret_cast<uint2*>(this->own_words())[item] = make_uint2(a, b);
  }
  __device__ void send_bin(int rank, int bin, uint32_t a, uint32_t b) { send(rank, bin, a, b); }
  __device__ void await_received(int, bool = true) { this->sync_team(); }
  __device__ uint2 received(int rank, int item) {
    return make_uint2(Team::received(rank, 2 * item), Team::received(rank, 2 * item + 1));
  }
  __device__ uint2 received_sums(int bin) {
    uint2 sums = make_uint2(0, 0);
#pragma unroll
    for (int rank = 0; rank < kMostTeam; ++rank) {
      const uint2 words = rank < this->team_ ? received(rank, bin) : make_uint2(0, 0);
      sums.x += words.x;
      sums.y += words.y;
    }
    return sums;
  }
  __device__ void end_exchange() {
    this->next_turn();
  }
  __device__ void meet() {
    this->sync_team();
  }

  __device__ Sums sums_before(Sums own, Sums& all) {
    Sums block;
    const Sums at = Team::sums_before(own, block);
    const Sums before = this->team_sums(block, all);
    return {before.a + at.a, before.b + at.b};
  }
};

}  // namespace sqz::cuda
