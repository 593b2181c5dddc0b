// Keys and values whose rows lie anywhere in an engine's cache, each by itself. Boxes of one row
// would keep the copy engine busy for longer than memory, so lanes copy 16 bytes each.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/prefill_attend/config.h"
#include "libruntime/kernels/cuda/prefill_attend/kernel.h"
#include "libruntime/kernels/cuda/prefill_common/ring.cuh"
#include "libruntime/kernels/cuda/prefill_common/segments.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_async.cuh"

namespace sqz::cuda::prefill {

// Of the warps that copy a tile of keys or values, at its barrier.
template <class Config>
constexpr uint32_t copy_arrivals() {
  return ptx::kWarpArrivals * (Config::kFirstChunks < Config::kChunks ? 2 : 1);
}

// As fetch_rows(), of keys or values from `from` on; `masks` where keys are fetched and `first` is
// 0.
template <class Config>
__device__ __forceinline__ void fetch_listed_rows(const PrefillAttendParams& params,
                                                  const WorkItem& item, const void* from, int first,
                                                  int end, uint8_t (*tiles)[Config::kTileBytes],
                                                  uint64_t* full, uint64_t* empty,
                                                  RingPosition<Config::kStages>& ring,
                                                  const uint32_t* masks,
                                                  uint32_t (*to_masks)[Config::kKeys]) {
  constexpr int kKeys = Config::kKeys, kOwn = kKeys / 32;
  constexpr uint32_t kNone = ~0u;  // past the last key: zeros
  const int lane = threadIdx.x & 31, piece = lane & 7;
  const uint32_t* rows =
      params.rows + (item.block * params.shape.kv_heads + item.kv_head) * params.mask_stride;
  const auto load = [&](int32_t key, uint32_t(&to)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int32_t at = key + 32 * i + lane;
      to[i] = at < item.end ? rows[at] : kNone;
    }
  };
  // Copies are ordinary writes: this warp waits for them, some tiles later, before wgmma may read.
  constexpr int kLag = std::clamp(Config::kStages - 2, 1, 3);
  RingPosition<Config::kStages> copied = ring;
  int under_way = 0;
  const auto hand_over = [&] {
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive_warp(&full[copied.stage]);
    copied.advance();
    --under_way;
  };
  uint32_t next[kOwn];
  load(item.begin, next);
  for (int32_t key = item.begin; key < item.end; key += kKeys, ring.advance()) {
    uint32_t own[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = next[i];
    load(key + kKeys, next);
    ptx::mbarrier_wait_parity(&empty[ring.stage], ring.parity ^ 1);
    if (masks != nullptr && lane == 0) {
      constexpr uint32_t kBytes = kKeys * sizeof(uint32_t);
      ptx::mbarrier_arrive_expect_tx(&full[ring.stage], kBytes);
      ptx::cp_async_bulk(to_masks[ring.stage], masks + key, kBytes, &full[ring.stage]);
    }
    __syncwarp();
    const uint32_t tile = ptx::shared_address(tiles[ring.stage]);
#pragma unroll 1
    for (int chunk = first; chunk < end; ++chunk) {
      const int at = 8 * chunk + piece;  // of a row, in 16 bytes
      const bool present = at < Config::kDim / 8;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll 1
        for (int j = 0; j < 8; ++j) {
          const int row = 4 * j + lane / 8;
          const uint32_t place = __shfl_sync(kAllLanes, own[i], row);
          const bool is = place != kNone && present;
          ptx::cp_async_16(
              tile + (chunk * kKeys + 32 * i + row) * kRowBytes + ((piece ^ (row & 7)) << 4),
              static_cast<const char*>(from) + (is ? int64_t{place} + at : 0) * 16, is ? 16 : 0);
        }
      }
    }
    ptx::cp_async_commit_group();
    if (++under_way > kLag) {
      ptx::cp_async_wait_group<kLag>();
      hand_over();
    }
  }
  ptx::cp_async_wait_group<0>();
  while (under_way > 0) hand_over();
}

}  // namespace sqz::cuda::prefill
