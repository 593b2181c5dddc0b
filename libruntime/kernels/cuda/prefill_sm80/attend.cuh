// Attention of blocks: a block of threads has some query rows of one pair and a part of its keys,
// tile by tile; keys of the next tile are on their way while values of this one are worked on, and
// the other way round. Parts of the same rows are merged by a kernel of their own.
#pragma once

#include "libruntime/kernels/cuda/common/cache_row.cuh"
#include "libruntime/kernels/cuda/prefill_sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill_sm80/tiles.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"

namespace sqz::cuda {

inline constexpr uint32_t kSm80Exact = 0x80000000u;

// A key and its value in memory, and what is added to the logit (log2).
struct Sm80Place {
  const char *key, *value;
  float bias;
};

// The keys of a pair: exact ones, then slots or those in its runs, then estimated clusters.
class Sm80Keys {
 public:
  __device__ Sm80Keys(const Sm80Attend& call, int pair)
      : p_(call.params),
        estimates_(call.estimates),
        pair_(pair),
        head_(pair % p_.kv_heads),
        list_(p_.lists.of_heads ? head_ : pair),
        exact_(p_.exact - p_.exact_skipped),
        listed_(p_.lists.totals != nullptr) {
    read_ = exact_ + (listed_ ? p_.lists.totals[list_].keys : p_.slots);
    count_ = read_ + (estimates_.list == nullptr ? 0 : estimates_.counts[pair]);
  }

  __device__ int64_t count() const { return count_; }
  __device__ bool fault() const { return listed_ && p_.lists.totals[list_].fault != 0; }

  __device__ Sm80Place locate(int64_t key) const {
    if (key >= read_) return estimated(key - read_);
    uint32_t where = 0;  // a slot, or an exact key with kSm80Exact
    if (key < exact_) {
      where = kSm80Exact | static_cast<uint32_t>(key + p_.exact_skipped);
    } else {
      where = listed_ ? slot_of(static_cast<uint32_t>(key - exact_))
                      : static_cast<uint32_t>(key - exact_);
    }
    const bool is_exact = (where & kSm80Exact) != 0;
    if (p_.cache.keys != nullptr) {
      const int64_t token = is_exact ? exact_token(p_.cache, p_.exact, where & ~kSm80Exact)
                                     : int64_t{p_.cache.positions[head_ * p_.slots + where]};
      const int64_t bytes = cache_bytes(p_.cache, cache_row(p_.cache, token), head_);
      return at(p_.cache.keys, p_.cache.values, bytes, 0);
    }
    const int64_t row = head_ * (is_exact ? p_.exact : p_.slots) + (where & ~kSm80Exact);
    return is_exact ? at(p_.exact_keys, p_.exact_values, row * p_.dim * 2, 0)
                    : at(p_.keys, p_.values, row * p_.dim * 2, 0);
  }

 private:
  __device__ uint32_t slot_of(uint32_t key) const {
    const RunLists& lists = p_.lists;
    const uint32_t* marks = lists.marks + list_ * lists.mark_capacity;
    const uint32_t* before = lists.before + list_ * (lists.capacity + 1);
    const RunTotals totals = lists.totals[list_];
    const uint32_t mark = key / kMarkKeys;
    uint32_t low = marks[mark];
    uint32_t high = (mark + 1) * kMarkKeys < totals.keys ? marks[mark + 1] : totals.runs - 1;
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (before[middle] <= key) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return lists.first[list_ * (lists.capacity + 1) + low] + (key - before[low]);
  }

  __device__ Sm80Place estimated(int64_t index) const {
    const uint32_t entry = estimates_.list[pair_ * estimates_.capacity + index];
    const Sm80Estimates::Level& level = estimates_.level[entry >> kLevelShift];
    const int64_t row = head_ * level.clusters + (entry & ((1u << kLevelShift) - 1));
    return at(level.centroids, level.value_means, row * p_.dim * 2,
              level.log_sizes[row] * 1.4426950408889634f);
  }

  __device__ static Sm80Place at(const void* keys, const void* values, int64_t bytes, float bias) {
    return {static_cast<const char*>(keys) + bytes, static_cast<const char*>(values) + bytes, bias};
  }

  const AttendParams& p_;
  const Sm80Estimates& estimates_;
  const int64_t pair_;
  const int head_;
  const int64_t list_, exact_;
  const bool listed_;
  int64_t read_, count_;  // keys that are read; with the estimated ones
};

template <class Element, int kDim>
class Sm80Attention {
  using Tile = Sm80Tile<kDim>;
  static constexpr int kKeyTiles = Tile::kStream / 8, kOutTiles = kDim / 8;

 public:
  __device__ Sm80Attention(const Sm80Attend& call, const Sm80Cut& cut, uint16_t* memory,
                           Sm80Place (&list)[2][Tile::kStream])
      : call_(call),
        p_(call.params),
        list_(list),
        part_(static_cast<int>(blockIdx.x) % cut.parts),
        parts_(cut.parts),
        first_(static_cast<int>(blockIdx.x) / cut.parts % cut.row_tiles * Tile::kRows),
        pair_(static_cast<int>(blockIdx.x) / cut.parts / cut.row_tiles),
        block_(block_of(call.blocks, pair_ / call.params.kv_heads)),
        rows_(block_.y * call.params.group),
        keys_(call, pair_),
        wide_(p_.q_dtype != p_.dtype),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        key_rows_(memory),
        value_rows_(key_rows_ + Tile::kStream * Tile::kStride),
        high_(value_rows_ + Tile::kStream * Tile::kStride),
        low_(high_ + Tile::kRows * Tile::kStride) {}

  __device__ void run() {
    if (first_ >= rows_) return;
    load_query_rows<Element, kDim, Tile::kRows>(
        p_.q, p_.q_dtype, p_.dtype,
        [&](int r) -> int64_t { return first_ + r < rows_ ? row_of(first_ + r) * kDim : -1; },
        high_, low_);
    begin_ = keys_.count() * part_ / parts_;
    end_ = keys_.count() * (part_ + 1) / parts_;
    attend();
    finish();
  }

 private:
  // Row of q, out and lse of row r of the block.
  __device__ int64_t row_of(int r) const {
    const int64_t token = block_.x + r / p_.group;
    return (token * p_.kv_heads + pair_ % p_.kv_heads) * p_.group + r % p_.group;
  }

  __device__ void attend() {
    if (begin_ < end_) start(begin_);
#pragma unroll 1
    for (int64_t tile = begin_; tile < end_; tile += Tile::kStream) {
      const int64_t next = tile + Tile::kStream;
      if (next < end_) locate(next);
      ptx::cp_async_wait_group<1>();
      __syncthreads();
      float logits[kKeyTiles][4] = {};
      add_product<Element, kDim, kKeyTiles>(high_ + warp_ * 16 * Tile::kStride, key_rows_, logits);
      if (wide_) {
        add_product<Element, kDim, kKeyTiles>(low_ + warp_ * 16 * Tile::kStride, key_rows_, logits);
      }
      __syncthreads();
      if (next < end_) fetch_keys(next);
      ptx::cp_async_commit_group();
      softmax(logits, end_ - tile, list_of(tile));
      ptx::cp_async_wait_group<1>();
      __syncthreads();
      add_values(logits);
      __syncthreads();
      if (next < end_) fetch_values(next);
      ptx::cp_async_commit_group();
    }
  }

  __device__ void start(int64_t tile) {
    locate(tile);
    __syncthreads();
    fetch_keys(tile);
    ptx::cp_async_commit_group();
    fetch_values(tile);
    ptx::cp_async_commit_group();
  }

  // Beyond the last key the last one's.
  __device__ void locate(int64_t tile) {
    if (threadIdx.x < Tile::kStream) {
      list_of(tile)[threadIdx.x] = keys_.locate(min(tile + threadIdx.x, end_ - 1));
    }
  }
  __device__ Sm80Place* list_of(int64_t tile) const {
    return list_[(tile - begin_) / Tile::kStream % 2];
  }
  __device__ void fetch_keys(int64_t tile) const {
    const Sm80Place* list = list_of(tile);
    fetch_rows<kDim, Tile::kStream>([&](int r) { return list[r].key; }, key_rows_);
  }
  __device__ void fetch_values(int64_t tile) const {
    const Sm80Place* list = list_of(tile);
    fetch_rows<kDim, Tile::kStream>([&](int r) { return list[r].value; }, value_rows_);
  }

  // Logits to weights.
  __device__ void softmax(float (&x)[kKeyTiles][4], int64_t left, const Sm80Place* places) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = maximum_[row];
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        float& logit = x[i / 2][2 * row + i % 2];
        const int key = i / 2 * 8 + 2 * (lane_ % 4) + i % 2;
        logit = key < left ? logit * p_.scale + places[key].bias : -INFINITY;
        top = fmaxf(top, logit);
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float factor = exp2f(maximum_[row] - top);
      maximum_[row] = top;
      sum_[row] *= factor;
#pragma unroll
      for (int i = 0; i < 2 * kOutTiles; ++i) out_[i / 2][2 * row + i % 2] *= factor;
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        float& weight = x[i / 2][2 * row + i % 2];
        weight = exp2f(weight - top);
        sum_[row] += weight;
      }
    }
  }

  __device__ void add_values(const float (&weights)[kKeyTiles][4]) {
    const uint32_t at =
        ptx::shared_address(value_rows_ + lane_ % 16 * Tile::kStride + lane_ / 16 * 8);
#pragma unroll
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &weights[2 * k + i / 2][i % 2 * 2];
        split<Element>(pair[0], pair[1], high[i], low[i]);
      }
#pragma unroll
      for (int t = 0; t < kOutTiles / 2; ++t) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, at + (16 * k * Tile::kStride + t * 16) * 2);
        Element::mma(out_[2 * t], high, b[0], b[1]);
        Element::mma(out_[2 * t + 1], high, b[2], b[3]);
        if (!wide_) continue;
        Element::mma(out_[2 * t], low, b[0], b[1]);
        Element::mma(out_[2 * t + 1], low, b[2], b[3]);
      }
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = sum_[row];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int local = warp_ * 16 + 8 * row + lane_ / 4, r = first_ + local;
      if (r >= rows_) continue;
      if (parts_ > 1) {
        leave_part(row, local, sum);
        continue;
      }
      const bool fault = keys_.fault();
      const float factor = fault ? NAN : sum == 0 ? 0 : 1 / sum;
#pragma unroll
      for (int t = 0; t < kOutTiles; ++t) {
        store_2(p_.q_dtype, out_[t][2 * row] * factor, out_[t][2 * row + 1] * factor, p_.out,
                row_of(r) * kDim + 8 * t + 2 * (lane_ % 4));
      }
      if (lane_ % 4 == 0) {
        p_.lse[row_of(r)] = fault      ? NAN
                            : sum == 0 ? -INFINITY
                                       : (maximum_[row] + log2f(sum)) * 0.6931471805599453f;
      }
    }
  }

  // For the merge: [values [d], maximum, sum] of a row.
  __device__ void leave_part(int row, int local, float sum) const {
    float* to =
        call_.partials + (static_cast<int64_t>(blockIdx.x) * Tile::kRows + local) * (kDim + 2);
#pragma unroll
    for (int t = 0; t < kOutTiles; ++t) {
      *reinterpret_cast<float2*>(to + 8 * t + 2 * (lane_ % 4)) =
          make_float2(out_[t][2 * row], out_[t][2 * row + 1]);
    }
    if (lane_ % 4 == 0) *reinterpret_cast<float2*>(to + kDim) = make_float2(maximum_[row], sum);
  }

  const Sm80Attend& call_;
  const AttendParams& p_;
  Sm80Place (&list_)[2][Tile::kStream];
  const int part_, parts_, first_, pair_;
  const int2 block_;
  const int rows_;
  const Sm80Keys keys_;
  const bool wide_;
  const int lane_, warp_;
  uint16_t *key_rows_, *value_rows_, *high_, *low_;
  int64_t begin_ = 0, end_ = 0;
  float maximum_[2] = {-3.0e38f, -3.0e38f}, sum_[2] = {};
  float out_[kOutTiles][4] = {};
};

template <class Element, int kDim>
__global__ void __launch_bounds__(Sm80Tile<kDim>::kThreads)
    sm80_attend_kernel(const __grid_constant__ Sm80Attend call,
                       const __grid_constant__ Sm80Cut cut) {
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ Sm80Place list[2][Sm80Tile<kDim>::kStream];
  Sm80Attention<Element, kDim>(call, cut, memory, list).run();
}

}  // namespace sqz::cuda
