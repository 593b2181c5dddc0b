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
#include "libruntime/kernels/cuda/ptx/lane.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda::prefill {

// Arrivals of the warps that write a tile of keys or values, at its barrier; and one for its masks.
template <class Config>
constexpr uint32_t copy_arrivals() {
  return 1 + ptx::kWarpArrivals * Config::kParts;
}

// The row of keys past the last.
alignas(16) __device__ const uint16_t kZeros[kMostCodedDim] = {};

// A producer warp's part of the keys of an item, or of its values: some rows of every tile that is
// its phase's turn. Lane kLanes n + j has 16 numbers of row n of those that are copied at a time,
// or of row n ^ 1 for the second half of a row, so that the stores of eight lanes meet all banks.
template <class T, class Config>
class RowFetcher {
  using Element = ElementOf<T>;
  static constexpr int kDim = Config::kDim;
  static constexpr int kRows = 32;                        // of this warp, one for each lane
  static constexpr int kLanes = 4 * Config::kChunks;      // of a row
  static constexpr int kOnce = 32 / kLanes;               // rows of a copy
  static constexpr int kGroup = 2;                        // copies that are decoded at a time
  static constexpr int kCodeRow = 16 * kLanes;            // bytes
  static constexpr uint32_t kNone = ~0u;                  // a key past the last
  static constexpr int kAhead = Config::kCodeStages - 1;  // tiles of codes under way
  static_assert(Config::kCoded && Config::kParts * kRows == Config::kKeys);

 public:
  __device__ RowFetcher(SharedStorage<Config>& shared, const PrefillAttendParams& params,
                        const WorkItem& item, int warp)
      : shared_(shared),
        params_(params),
        item_(item),
        lane_(ptx::lane()),
        values_(takes_values(warp)),
        part_(warp / 2 % Config::kParts),
        phase_(warp / 2 / Config::kParts),
        row_((lane_ / kLanes) ^ (lane_ / 4 % Config::kChunks)),
        codes_at_(shared.codes[values_ ? 1 : 0][phase_][0] + (part_ * kRows + row_) * kCodeRow +
                  16 * (lane_ % kLanes)),
        sources_(shared.rows[warp][0]) {
    const ContextLayer* own = own_layer(params, item.block);
    own == nullptr ? take(params.keys, params.exact) : take(own->keys, own->lookup.exact);
    if (params.masks != nullptr) rows_ = params.rows + list() * params.mask_stride;
  }

  // As fetch_rows(). Copies of codes need no stage of the ring. Each lane has a row: its place is
  // loaded two of the phase's tiles before its copy, cluster and scale one, and all of them while a
  // tile is decoded.
  __device__ void run(RingPosition<Config::kStages>& ring) {
    const int32_t step = Config::kPhases * item_.step;
    int32_t first = item_.begin + phase_ * item_.step;  // of the tile whose codes are copied
    uint32_t place = place_of(first), next = place_of(first + step), cluster = 0, scale = 0;
    find_cluster(place, cluster, scale);
    RingPosition<Config::kCodeStages> codes;
    const int tiles = (item_.end - item_.begin + item_.step - 1) / item_.step;
    for (int i = 0; i < phase_ && i < tiles; ++i) ring.advance();
#pragma unroll 1
    for (int tile = phase_ - kAhead * Config::kPhases; tile < tiles; tile += Config::kPhases) {
      if (first < item_.end) copy_codes(codes.stage, place, cluster, scale);
      codes.advance();
      ptx::cp_async_commit_group();
      place = next;
      find_cluster(place, cluster, scale);
      next = place_of(first + 2 * step);  // after it: a wait may be for all loads so far
      first += step;
      if (tile < 0) continue;
      ptx::cp_async_wait_group<kAhead>();
      write_tile(codes.stage, ring, item_.begin + tile * item_.step);
      for (int i = 0; i < Config::kPhases && tile + i < tiles; ++i) ring.advance();
    }
  }

 private:
  // Takes the addresses and numbers that the loops use. exact: exact keys that are attended.
  template <class Keys>
  __device__ void take(const Keys& keys, uint32_t exact) {
    const CodedRows& rows = values_ ? keys.coded.values : keys.coded.keys;
    codes_ = reinterpret_cast<const char*>(rows.codes) + 16 * (lane_ % kLanes);
    scales_ = static_cast<const uint16_t*>(rows.scales);
    clusters_ = keys.coded.clusters;
    means_ = static_cast<const char*>(values_ ? keys.coded.mean_values : keys.coded.mean_keys) +
             int64_t{item_.kv_head * keys.coded.count} * (2 * kDim);
    exact_rows_ = static_cast<const char*>(values_ ? keys.exact_values : keys.exact_keys);
    exact_ = static_cast<int32_t>(exact);
    first_exact_ =
        kExactRow | static_cast<uint32_t>(item_.kv_head * keys.exact + keys.exact_skipped);
    first_slot_ = static_cast<uint32_t>(item_.kv_head * keys.slots);
  }
  __device__ int64_t list() const {
    return item_.block * params_.shape.kv_heads + item_.kv_head;
  }
  // The lane's row of the tile that begins at `first`, numbered as in PrefillAttend::rows.
  __device__ uint32_t place_of(int32_t first) const {
    const int32_t key = first + part_ * kRows + lane_;
    if (key >= item_.end) return kNone;
    if (rows_ != nullptr) return rows_[key];
    return key < exact_ ? first_exact_ + key : first_slot_ + (key - exact_);
  }
  __device__ void find_cluster(uint32_t place, uint32_t& cluster, uint32_t& scale) const {
    if ((place & kExactRow) != 0) return;
    cluster = __ldg(clusters_ + place);
    scale = __ldg(scales_ + place);
  }

  // Starts the copies of a tile's codes, and leaves what they are to be added to.
  __device__ void copy_codes(int stage, uint32_t place, uint32_t cluster, uint32_t scale) const {
    RowSource source = {exact_rows_ + int64_t{place & ~kExactRow} * (2 * kDim), 0};
    if (place == kNone) source.numbers = reinterpret_cast<const char*>(kZeros);
    if ((place & kExactRow) == 0) {
      source = {means_ + int64_t{cluster & ~kFirstSlot} * (2 * kDim), scale * 0x10001u};
      for (int line = 0; (cluster & kFirstSlot) != 0 && line < 2 * kDim; line += kRowBytes) {
        ptx::prefetch_l2(source.numbers + line);
      }
    }
    sources_[stage * kRows + lane_] = source;
    const uint32_t to = ptx::shared_address(codes_at_) + stage * Config::kCodeBytes;
#pragma unroll
    for (int row = 0; row < kRows; row += kOnce) {
      const uint32_t from = __shfl_sync(kAllLanes, place, row + row_);
      if ((from & kExactRow) != 0 || !is_inside()) continue;
      ptx::cp_async_16(to + row * kCodeRow, codes_ + int64_t{from} * kDim, 16);
    }
  }
  // Whether the lane's 16 numbers of a row are in the head.
  __device__ bool is_inside() const {
    return kDim % 64 == 0 || lane_ % kLanes < kDim / 16;
  }

  // Writes the tile that begins at `key` into the ring's stage as soon as that is free.
  __device__ void write_tile(int stage, const RingPosition<Config::kStages>& ring,
                             int32_t key) const {
    uint64_t* full = &(values_ ? shared_.values_full : shared_.keys_full)[ring.stage];
    uint64_t* empty = &(values_ ? shared_.values_empty : shared_.keys_empty)[ring.stage];
    __syncwarp();  // all lanes' copies are there
    // A tile is [chunk][key][kRowBytes], swizzled.
    uint8_t* tile =
        (values_ ? shared_.values : shared_.keys)[ring.stage] +
        (lane_ / 4 % Config::kChunks * Config::kKeys + part_ * kRows + row_) * kRowBytes;
    const int piece = ((2 * (lane_ % 4)) ^ row_) << 4;
    const uint8_t* codes = codes_at_ + stage * Config::kCodeBytes;
    const RowSource* sources = sources_ + stage * kRows + row_;
#pragma unroll
    for (int first = 0; first < kRows; first += kGroup * kOnce) {
      uint4 numbers[kGroup][2];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const auto* own = reinterpret_cast<const uint4*>(sources[first + i * kOnce].numbers) +
                          2 * (lane_ % kLanes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          numbers[i][half] = is_inside() ? __ldg(own + half) : make_uint4(0, 0, 0, 0);
        }
      }
      if (first == 0) {
        ptx::mbarrier_wait_parity(empty, ring.parity ^ 1);
        if (part_ == 0 && lane_ == 0) fetch_masks(full, ring.stage, key);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int row = first + i * kOnce;
        const uint32_t scales = sources[row].scales;
        const uint4 own = *reinterpret_cast<const uint4*>(codes + row * kCodeRow);
        uint8_t* to = tile + row * kRowBytes;
        const int at = piece ^ (row % 8) << 4;
        *reinterpret_cast<uint4*>(to + at) =
            decode_8<Element>(make_uint2(own.x, own.y), scales, numbers[i][0]);
        *reinterpret_cast<uint4*>(to + (at ^ 16)) =
            decode_8<Element>(make_uint2(own.z, own.w), scales, numbers[i][1]);
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive_warp(full);
  }
  // The masks of a tile of keys arrive at its barrier, too.
  __device__ void fetch_masks(uint64_t* full, int stage, int32_t key) const {
    constexpr uint32_t kBytes = Config::kKeys * sizeof(uint32_t);
    const bool masks = !values_ && params_.masks != nullptr;
    ptx::mbarrier_arrive_expect_tx(full, masks ? kBytes : 0);
    if (!masks) return;
    ptx::cp_async_bulk(shared_.masks[stage], params_.masks + list() * params_.mask_stride + key,
                       kBytes, full);
  }

  SharedStorage<Config>& shared_;
  const PrefillAttendParams& params_;
  const WorkItem& item_;
  const int lane_;
  const bool values_;
  const int part_, phase_;
  const int row_;             // the lane's of those that are copied at a time
  uint8_t* const codes_at_;   // the lane's first 16 codes in shared memory
  RowSource* const sources_;  // [kCodeStages][kRows]
  const uint32_t* rows_ = nullptr;
  const char *codes_, *means_, *exact_rows_;
  const uint16_t* scales_;
  const uint32_t* clusters_;
  uint32_t first_exact_, first_slot_;  // row numbers of the head's first
  int32_t exact_;
};

}  // namespace sqz::cuda::prefill
