// Fetches rows of 8 bits, which become 16 bits on their way. The copy engine cannot do that: lanes
// copy codes, 16 bytes each, and decode them some tiles later.
#pragma once

#include "libruntime/kernels/cuda/common/rows8.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm90/config.h"
#include "libruntime/kernels/cuda/prefill/attend/sm90/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/ring.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/common/segments.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async_bulk.cuh"
#include "libruntime/kernels/cuda/ptx/fence_proxy_async.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda::prefill {

// Arrivals of the warps that write a tile of keys or values, at its barrier; and one for its masks.
template <class Config>
constexpr uint32_t copy_arrivals() {
  return 1 + ptx::kWarpArrivals * Config::kParts * (Config::kFirstChunks < Config::kChunks ? 2 : 1);
}

// The row of keys past the last.
alignas(16) __device__ const uint16_t kZeros[kMostCodedDim] = {};

// A producer warp's part of the keys of an item, or of its values.
template <class T, class Config>
class RowFetcher {
  using Element = ElementOf<T>;
  static constexpr int kKeys = Config::kKeys, kDim = Config::kDim;
  static constexpr int kOnce = 8;                         // rows of a copy
  static constexpr uint32_t kNone = ~0u;                  // a key past the last
  static constexpr int kAhead = Config::kCodeStages - 1;  // tiles of codes under way
  static_assert(Config::kCoded && Config::kParts * 32 == kKeys && Config::kFirstChunks == 1);

 public:
  __device__ RowFetcher(SharedStorage<Config>& shared, const PrefillAttendParams& params,
                        const WorkItem& item, int warp)
      : shared_(shared),
        item_(item),
        values_(takes_values(warp)),
        warp_(warp),
        chunk_(warp / 2 % 2),
        first_row_(warp / 4 * 32),
        lane_(static_cast<int>(threadIdx.x & 31)),
        inside_(kDim % 64 == 0 || 4 * chunk_ + lane_ % 4 < kDim / 16) {
    const ContextLayer* own = own_layer(params, item.block);
    own == nullptr ? take(params.keys, params.exact) : take(own->keys, own->lookup.exact);
    if (params.masks == nullptr) return;
    const int64_t list = item.block * params.shape.kv_heads + item.kv_head;
    rows_ = params.rows + list * params.mask_stride;
    masks_ = params.masks + list * params.mask_stride;
  }

  // As fetch_rows(). Copies of codes need no stage of the ring. Each lane has a row: its place is
  // loaded two tiles before its copy, cluster and scale one, and all of them while a tile is
  // decoded.
  __device__ void run(RingPosition<Config::kStages>& ring) {
    uint32_t place = place_of(item_.begin), next = place_of(item_.begin + item_.step);
    uint32_t cluster = 0, scale = 0;
    find_cluster(place, cluster, scale);
    RingPosition<Config::kCodeStages> copied, ready;
    int32_t key = item_.begin;  // of the tile whose codes are complete next
#pragma unroll 1
    for (int32_t first = item_.begin; key < item_.end; first += item_.step) {
      if (first < item_.end) copy_codes(copied.stage, place, cluster, scale);
      copied.advance();
      ptx::cp_async_commit_group();
      const uint32_t later = place_of(first + 2 * item_.step);
      find_cluster(next, cluster, scale);
      if (first >= item_.begin + kAhead * item_.step) {
        ptx::cp_async_wait_group<kAhead>();
        write_tile(ready.stage, ring, key);
        ready.advance();
        key += item_.step;
      }
      place = next;
      next = later;
    }
  }

 private:
  // Takes the addresses and numbers that the loops use. exact: exact keys that are attended.
  template <class Keys>
  __device__ void take(const Keys& keys, uint32_t exact) {
    const CodedRows& rows = values_ ? keys.coded.values : keys.coded.keys;
    codes_ = reinterpret_cast<const char*>(rows.codes) + 64 * chunk_ + 16 * (lane_ % 4);
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
  // The lane's row of the tile that begins at `first`, numbered as in PrefillAttend::rows.
  __device__ uint32_t place_of(int32_t first) const {
    const int32_t key = first + first_row_ + lane_;
    if (key >= item_.end) return kNone;
    if (rows_ != nullptr) return rows_[key];
    return key < exact_ ? first_exact_ + key : first_slot_ + (key - exact_);
  }
  __device__ void find_cluster(uint32_t place, uint32_t& cluster, uint32_t& scale) const {
    if ((place & kExactRow) != 0) return;
    cluster = __ldg(clusters_ + place);
    scale = __ldg(scales_ + place);
  }

  // The lane's first 16 codes: a stage has [chunk][key][kRowBytes / 2].
  __device__ uint8_t* codes_at(int stage) const {
    return shared_.codes[values_ ? 1 : 0][stage] + (chunk_ * kKeys + first_row_) * (kRowBytes / 2) +
           16 * lane_;
  }

  // Starts the copies of a tile's codes, and leaves what they are to be added to.
  __device__ void copy_codes(int stage, uint32_t place, uint32_t cluster, uint32_t scale) const {
    RowSource source = {exact_rows_ + int64_t{place & ~kExactRow} * (2 * kDim), 0};
    if (place == kNone) source.numbers = reinterpret_cast<const char*>(kZeros);
    if ((place & kExactRow) == 0) {
      source = {means_ + int64_t{first_mean_ + (cluster & ~kFirstSlot)} * (2 * kDim),
                scale * 0x10001u};
      if ((cluster & kFirstSlot) != 0) ptx::prefetch_l2(source.numbers + chunk_ * kRowBytes);
    }
    shared_.rows[warp_][stage][lane_] = source;
    const uint32_t to = ptx::shared_address(codes_at(stage));
#pragma unroll
    for (int row = 0; row < 32; row += kOnce) {
      const uint32_t from = __shfl_sync(kAllLanes, place, row + lane_ / 4);
      if ((from & kExactRow) != 0 || !inside_) continue;
      ptx::cp_async_16(to + row * (kRowBytes / 2), codes_ + int64_t{from} * kDim, 16);
    }
  }

  // Writes the tile that begins at `key` into the ring's stage as soon as that is free.
  __device__ void write_tile(int stage, RingPosition<Config::kStages>& ring, int32_t key) const {
    uint64_t* full = &(values_ ? shared_.values_full : shared_.keys_full)[ring.stage];
    uint64_t* empty = &(values_ ? shared_.values_empty : shared_.keys_empty)[ring.stage];
    __syncwarp();  // all lanes' copies are there
    uint4 numbers[32 / kOnce][2];
#pragma unroll
    for (int i = 0; i < 32 / kOnce; ++i) {
      const char* from = shared_.rows[warp_][stage][kOnce * i + lane_ / 4].numbers;
      const auto* own = reinterpret_cast<const uint4*>(from + chunk_ * kRowBytes) + 2 * (lane_ % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        numbers[i][half] = inside_ ? __ldg(own + half) : make_uint4(0, 0, 0, 0);
      }
    }
    ptx::mbarrier_wait_parity(empty, ring.parity ^ 1);
    if (chunk_ == 0 && first_row_ == 0 && lane_ == 0) {
      constexpr uint32_t kBytes = kKeys * sizeof(uint32_t);
      const bool masks = !values_ && masks_ != nullptr;
      ptx::mbarrier_arrive_expect_tx(full, masks ? kBytes : 0);
      if (masks) ptx::cp_async_bulk(shared_.masks[ring.stage], masks_ + key, kBytes, full);
    }
    // A tile is [chunk][key][kRowBytes], swizzled.
    uint8_t* tile = (values_ ? shared_.values : shared_.keys)[ring.stage] +
                    (chunk_ * kKeys + first_row_ + lane_ / 4) * kRowBytes;
    const int piece = ((2 * (lane_ % 4)) ^ (lane_ / 4)) << 4;
    const uint8_t* codes = codes_at(stage);
#pragma unroll
    for (int i = 0; i < 32 / kOnce; ++i) {
      const uint32_t scales = shared_.rows[warp_][stage][kOnce * i + lane_ / 4].scales;
      const uint4 own = *reinterpret_cast<const uint4*>(codes + kOnce * i * (kRowBytes / 2));
      uint8_t* to = tile + kOnce * i * kRowBytes;
      *reinterpret_cast<uint4*>(to + piece) =
          decode_8<Element>(make_uint2(own.x, own.y), scales, numbers[i][0]);
      *reinterpret_cast<uint4*>(to + (piece ^ 16)) =
          decode_8<Element>(make_uint2(own.z, own.w), scales, numbers[i][1]);
    }
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive_warp(full);
    ring.advance();
  }

  SharedStorage<Config>& shared_;
  const WorkItem& item_;
  const bool values_;
  const int warp_, chunk_, first_row_, lane_;
  const bool inside_;  // the lane's 16 numbers of a row are in the head
  const uint32_t *rows_ = nullptr, *masks_ = nullptr;
  const char *codes_, *means_, *exact_rows_;
  const uint16_t* scales_;
  const uint32_t* clusters_;
  uint32_t first_mean_, first_exact_, first_slot_;  // row numbers of the head's first
  int32_t exact_;
};

}  // namespace sqz::cuda::prefill
