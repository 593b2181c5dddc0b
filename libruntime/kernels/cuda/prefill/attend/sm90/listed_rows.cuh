// Fetches rows of 8 bits, which become 16 bits on their way. The copy engine cannot do that: lanes
// copy 16 bytes each.
#pragma once

#include <algorithm>

#include "libruntime/kernels/cuda/common/rows8.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm90/config.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/common/segments.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_async.cuh"

namespace sqz::cuda::prefill {

// Arrivals of the warps that copy a tile of keys or values, at its barrier; and one for its masks.
template <class Config>
constexpr uint32_t copy_arrivals() {
  return 1 + ptx::kWarpArrivals * (Config::kFirstChunks < Config::kChunks ? 2 : 1);
}

// A warp's chunks [first, end) of the keys of an item, or of its values.
template <class T, class Config>
class RowFetcher {
  using Element = ElementOf<T>;
  static constexpr int kKeys = Config::kKeys, kOwn = kKeys / 32, kDim = Config::kDim;
  static_assert(Config::kCoded);
  static constexpr uint32_t kNone = ~0u;      // in place of a place: past the last key, zeros
  static constexpr uint32_t kNotCoded = ~0u;  // in place of a scale: a row of 16 bits
  using Own = uint32_t[kOwn];                 // of the lane's keys of a tile: every 32nd

 public:
  __device__ RowFetcher(SharedStorage<Config>& shared, const PrefillAttendParams& params,
                        const WorkItem& item, bool values, int first, int end)
      : shared_(shared),
        item_(item),
        values_(values),
        first_(first),
        end_(end),
        lane_(static_cast<int>(threadIdx.x & 31)) {
    const ContextLayer* own = own_layer(params, item.block);
    own == nullptr ? take(params.keys, params.exact) : take(own->keys, own->lookup.exact);
    if (params.masks == nullptr) return;
    const int64_t list = item.block * params.shape.kv_heads + item.kv_head;
    rows_ = params.rows + list * params.mask_stride;
    masks_ = params.masks + list * params.mask_stride;
  }

  // As fetch_rows(). What a tile's copies need is loaded while those before it are started: places
  // two tiles ahead, clusters and scales one.
  __device__ void run(RingPosition<Config::kStages>& ring) {
    uint64_t* full = values_ ? shared_.values_full : shared_.keys_full;
    uint64_t* empty = values_ ? shared_.values_empty : shared_.keys_empty;
    // Copies are ordinary writes: this warp waits for them, some tiles later, before wgmma may
    // read.
    constexpr int kLag = std::clamp(Config::kStages - 2, 1, 3);
    RingPosition<Config::kStages> copied = ring;
    int under_way = 0;
    const auto hand_over = [&] {
      __syncwarp();
      decode(copied.stage);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive_warp(&full[copied.stage]);
      copied.advance();
      --under_way;
    };
    Own places, next, clusters, scales;
    find(item_.begin, places);
    find(item_.begin + item_.step, next);
    find_clusters(places, clusters, scales);
#pragma unroll 1
    for (int32_t key = item_.begin; key < item_.end; key += item_.step, ring.advance()) {
      Own later, next_clusters, next_scales;
      find(key + 2 * item_.step, later);
      find_clusters(next, next_clusters, next_scales);
      ptx::mbarrier_wait_parity(&empty[ring.stage], ring.parity ^ 1);
      if (first_ == 0 && lane_ == 0) {
        constexpr uint32_t kBytes = kKeys * sizeof(uint32_t);
        const bool masks = !values_ && masks_ != nullptr;
        ptx::mbarrier_arrive_expect_tx(&full[ring.stage], masks ? kBytes : 0);
        if (masks) {
          ptx::cp_async_bulk(shared_.masks[ring.stage], masks_ + key, kBytes, &full[ring.stage]);
        }
      }
      __syncwarp();
      copy_codes(ring.stage, places, scales);
      copy_rows(ring.stage, places, clusters);
      ptx::cp_async_commit_group();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        places[i] = next[i];
        next[i] = later[i];
        clusters[i] = next_clusters[i];
        scales[i] = next_scales[i];
      }
      if (++under_way > kLag) {
        ptx::cp_async_wait_group<kLag>();
        hand_over();
      }
    }
    ptx::cp_async_wait_group<0>();
    while (under_way > 0) hand_over();
  }

 private:
  // What the loops read of a layer's keys: exact, of which so many are attended, and rows of codes.
  template <class Keys>
  __device__ void take(const Keys& keys, uint32_t exact) {
    const CodedRows& rows = values_ ? keys.coded.values : keys.coded.keys;
    codes_ = reinterpret_cast<const char*>(rows.codes);
    scales_ = static_cast<const uint16_t*>(rows.scales);
    clusters_ = keys.coded.clusters;
    means_ = static_cast<const char*>(values_ ? keys.coded.mean_values : keys.coded.mean_keys);
    exact_rows_ = static_cast<const char*>(values_ ? keys.exact_values : keys.exact_keys);
    first_mean_ = item_.kv_head * keys.coded.count;
    exact_ = static_cast<int32_t>(exact);
    first_exact_ =
        kExactRow | static_cast<uint32_t>(item_.kv_head * keys.exact + keys.exact_skipped);
    first_slot_ = static_cast<uint32_t>(item_.kv_head * keys.slots);
  }
  __device__ void find(int32_t key, Own& to) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[i] = place_of(key + 32 * i + lane_);
  }
  __device__ uint32_t place_of(int32_t key) const {
    if (key >= item_.end) return kNone;
    if (rows_ != nullptr) return rows_[key];
    return key < exact_ ? first_exact_ + key : first_slot_ + (key - exact_);
  }
  __device__ void find_clusters(const Own& places, Own& clusters, Own& scales) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      scales[i] = kNotCoded;
      if ((places[i] & kExactRow) != 0) continue;
      scales[i] = __ldg(scales_ + places[i]);
      clusters[i] = __ldg(clusters_ + places[i]);
    }
  }

  // A tile is [chunk][key][kRowBytes], swizzled; its codes are [chunk][key][kRowBytes / 2].
  __device__ uint8_t* tile(int stage) const {
    return values_ ? shared_.values[stage] : shared_.keys[stage];
  }
  __device__ uint8_t* row_at(int stage, int chunk, int row, int piece) const {
    return tile(stage) + (chunk * kKeys + row) * kRowBytes + ((piece ^ (row & 7)) << 4);
  }
  __device__ uint8_t* codes_at(int stage, int chunk, int row) const {
    return shared_.codes[values_ ? 1 : 0][stage] + (chunk * kKeys + row) * (kRowBytes / 2);
  }
  __device__ uint32_t* scales_of(int stage) const {
    return shared_.scales[threadIdx.x / 32][stage];
  }

  // Starts the copies of a tile's codes.
  __device__ void copy_codes(int stage, const Own& places, const Own& scales) const {
    const int piece = lane_ & 3;  // 16 codes
#pragma unroll
    for (int i = 0; i < kOwn; ++i) scales_of(stage)[32 * i + lane_] = scales[i];
#pragma unroll 1
    for (int chunk = first_; chunk < end_; ++chunk) {
      const int at = 4 * chunk + piece;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        uint32_t place[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          place[j] = __shfl_sync(kAllLanes, places[i], 8 * j + lane_ / 4);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool is = (place[j] & kExactRow) == 0 && at < kDim / 16;
          uint8_t* to = codes_at(stage, chunk, 32 * i + 8 * j + lane_ / 4) + 16 * piece;
          ptx::cp_async_16(ptx::shared_address(to),
                           codes_ + (is ? int64_t{place[j]} * kDim + 16 * at : 0), is ? 16 : 0);
        }
      }
    }
  }

  // Starts the copies of the means of rows of codes, and of exact rows, to where the rows belong.
  __device__ void copy_rows(int stage, const Own& places, const Own& clusters) const {
    constexpr int kOnce = 4;
    const int piece = lane_ & 7;  // 8 numbers
    Own from;                     // in units of a row
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      from[i] = places[i];
      if ((places[i] & kExactRow) == 0) {
        from[i] = first_mean_ + (clusters[i] & ~kFirstSlot);
      }
    }
#pragma unroll 1
    for (int chunk = first_; chunk < end_; ++chunk) {
      const int at = 8 * chunk + piece;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll 1
        for (int j = 0; j < 8; j += kOnce) {
          uint32_t place[kOnce];
#pragma unroll
          for (int n = 0; n < kOnce; ++n) {
            place[n] = __shfl_sync(kAllLanes, from[i], 4 * (j + n) + lane_ / 8);
          }
#pragma unroll
          for (int n = 0; n < kOnce; ++n) {
            const bool is = place[n] != kNone && at < kDim / 8;
            const char* base = (place[n] & kExactRow) != 0 ? exact_rows_ : means_;
            const int64_t offset = int64_t{place[n] & ~kExactRow} * (2 * kDim);
            uint8_t* to = row_at(stage, chunk, 32 * i + 4 * (j + n) + lane_ / 8, piece);
            ptx::cp_async_16(ptx::shared_address(to), base + (is ? offset + 16 * at : 0),
                             is ? 16 : 0);
          }
        }
      }
    }
  }

  // Adds codes times scales to the means.
  __device__ void decode(int stage) const {
    constexpr int kOnce = 4;
    const int piece = lane_ & 7;
#pragma unroll 1
    for (int chunk = first_; chunk < end_; ++chunk) {
      const bool is = 8 * chunk + piece < kDim / 8;
#pragma unroll 1
      for (int first = lane_ / 8; first < kKeys; first += 4 * kOnce) {
        uint32_t scale[kOnce];
        uint2 codes[kOnce];
        uint4 means[kOnce];
#pragma unroll
        for (int n = 0; n < kOnce; ++n) {
          const int row = first + 4 * n;
          scale[n] = scales_of(stage)[row];
          codes[n] = *reinterpret_cast<const uint2*>(codes_at(stage, chunk, row) + 8 * piece);
          means[n] = *reinterpret_cast<const uint4*>(row_at(stage, chunk, row, piece));
        }
#pragma unroll
        for (int n = 0; n < kOnce; ++n) {
          means[n] = decode_8<Element>(codes[n], static_cast<uint16_t>(scale[n]), means[n]);
        }
#pragma unroll
        for (int n = 0; n < kOnce; ++n) {
          if (scale[n] == kNotCoded || !is) continue;
          *reinterpret_cast<uint4*>(row_at(stage, chunk, first + 4 * n, piece)) = means[n];
        }
      }
    }
  }

  SharedStorage<Config>& shared_;
  const WorkItem& item_;
  const bool values_;
  const int first_, end_, lane_;
  const uint32_t *rows_ = nullptr, *masks_ = nullptr;
  const char *codes_, *means_, *exact_rows_;
  const uint16_t* scales_;
  const uint32_t* clusters_;
  uint32_t first_mean_, first_exact_, first_slot_;  // row numbers of the head's first
  int32_t exact_;
};

}  // namespace sqz::cuda::prefill
