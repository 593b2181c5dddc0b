// A team that is a cluster of compute capability 9.0. Its blocks push words into each other's
// shared memory (st.async), and an mbarrier there counts them. No barrier waits for all that a
// block has written, and a block leaves when it is done.
#pragma once

#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"
#include "libruntime/kernels/cuda/ptx/mbarrier.cuh"

namespace sqz::cuda {

inline constexpr int kLookupThreads = 512;
inline constexpr int kLookupWarps = kLookupThreads / 32;
inline constexpr int kRadixBins = 256;  // of scores, a histogram's

// Exchanges follow each other, the same for all blocks: in each, a block sends every member as
// much, itself too, and awaits as much from every member. Exchange number exchange_ has the buffers
// of turn(): nobody is two exchanges ahead of a block that still reads.
class PushTeam {
 public:
  static constexpr int kThreads = kLookupThreads, kWarps = kLookupWarps;

  struct Shared {
    uint2 inbox[2][kMostGroup * kMostTeam];  // by the team, in turn
    uint64_t arrived[2];                     // mbarriers: all of an exchange is there
    uint2 warp_sums[2][kWarps];              // in turn
  };
  // Bytes of `bins`, to which members send their bins: uint2 [2][team][kRadixBins].
  static constexpr int64_t bin_bytes(int team) {
    return static_cast<int64_t>(sizeof(uint2)) * 2 * kRadixBins * team;
  }

  __device__ PushTeam(int team, Shared& shared, uint2* bins)
      : team_(team),
        rank_(static_cast<int>(blockIdx.x) % team),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        shared_(shared),
        bins_(bins) {}

 protected:
  // Blocks write only to blocks that have begun: before the first send(), await_team().
  __device__ void begin_team() const {
    if (thread_ == 0) {
      ptx::mbarrier_init(&shared_.arrived[0], 1);
      ptx::mbarrier_init(&shared_.arrived[1], 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
  }
  __device__ void await_team() const { ptx::barrier_cluster_wait(); }

  // Two words to block `rank`, as item `item` of this exchange, or bin `bin`: to every block
  // the same, so that a team may also keep them for all to fetch.
  __device__ void send(int rank, int item, uint32_t a, uint32_t b) const {
    push(rank, slot(rank_, item), a, b);
  }
  __device__ void send_bin(int rank, int bin, uint32_t a, uint32_t b) const {
    push(rank, bin_slot(rank_, bin), a, b);
  }
  // Until every member has sent `items`. By the whole block; threads that read what was sent wait,
  // warp 0 among them. end_exchange() follows.
  __device__ void await_received(int items, bool reads = true) const {
    if (!reads) return;
    if (thread_ == 0) {
      ptx::mbarrier_arrive_expect_tx(&shared_.arrived[turn()],
                                     static_cast<uint32_t>(items * team_) * sizeof(uint2));
    }
    ptx::mbarrier_wait_parity(&shared_.arrived[turn()], exchange_ / 2 % 2);
  }
  // The words that block `rank` has sent.
  __device__ uint2 received(int rank, int item) const { return *slot(rank, item); }
  // The sums of what all members sent for a bin.
  __device__ uint2 received_sums(int bin) const {
    uint2 sums = make_uint2(0, 0);
#pragma unroll 4
    for (int rank = 0; rank < team_; ++rank) {
      const uint2 words = *bin_slot(rank, bin);
      sums.x += words.x;
      sums.y += words.y;
    }
    return sums;
  }
  __device__ void end_exchange() {
    ++exchange_;
  }
  // The team's writes to global memory before it are seen after it.
  __device__ void meet() const {
    __syncwarp();
    ptx::barrier_cluster();
  }

  // Sums of the threads before this one over the team, and of the team. An exchange.
  __device__ Sums sums_before(Sums own, Sums& all) {
    Sums scan = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t a = __shfl_up_sync(~0u, scan.a, step), b = __shfl_up_sync(~0u, scan.b, step);
      scan.a += lane_ >= step ? a : 0;
      scan.b += lane_ >= step ? b : 0;
    }
    uint2* warp_sums = shared_.warp_sums[turn()];
    if (lane_ == 31) warp_sums[warp_] = make_uint2(scan.a, scan.b);
    __syncthreads();
    // Lane w: of warp w.
    const uint2 of_warp = lane_ < kWarps ? warp_sums[lane_] : make_uint2(0, 0);
    if (warp_ == 0) {
      const uint32_t a = __reduce_add_sync(~0u, of_warp.x), b = __reduce_add_sync(~0u, of_warp.y);
      if (lane_ < team_) send(lane_, 0, a, b);
    }
    await_received(1);
    const uint2 of_rank = lane_ < team_ ? received(lane_, 0) : make_uint2(0, 0);
    end_exchange();
    all.a = __reduce_add_sync(~0u, of_rank.x);
    all.b = __reduce_add_sync(~0u, of_rank.y);
    const uint32_t a = (lane_ < warp_ ? of_warp.x : 0) + (lane_ < rank_ ? of_rank.x : 0);
    const uint32_t b = (lane_ < warp_ ? of_warp.y : 0) + (lane_ < rank_ ? of_rank.y : 0);
    return {scan.a - own.a + __reduce_add_sync(~0u, a), scan.b - own.b + __reduce_add_sync(~0u, b)};
  }

  const int team_, rank_, thread_, lane_, warp_;

 private:
  __device__ int turn() const {
    return exchange_ % 2;
  }
  __device__ uint2* slot(int rank, int item) const {
    return shared_.inbox[turn()] + item * kMostTeam + rank;
  }
  __device__ uint2* bin_slot(int rank, int bin) const {
    return bins_ + (turn() * team_ + rank) * kRadixBins + bin;
  }
  __device__ void push(int rank, const uint2* to, uint32_t a, uint32_t b) const {
    ptx::st_async_8(ptx::mapa(ptx::shared_address(to), rank), a, b,
                    ptx::mapa(ptx::shared_address(&shared_.arrived[turn()]), rank));
  }

  Shared& shared_;
  uint2* const bins_;
  int exchange_ = 0;
};

}  // namespace sqz::cuda
