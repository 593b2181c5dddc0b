// Attention of blocks: a block of threads has some query rows of one pair and a part of its keys,
// tile by tile. Values are on their way while logits are made, keys of the next tile while values
// are worked on; two blocks share a multiprocessor, so that one multiplies while the other weighs.
// merge_splits() merges parts of the same rows.
#pragma once

#include "libruntime/kernels/cuda/common/run_search.cuh"
#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill/attend/softmax.cuh"
#include "libruntime/kernels/cuda/prefill/common/sm80_tile.cuh"
#include "libruntime/kernels/cuda/ptx/ldmatrix.cuh"

namespace sqz::cuda {

// The places of a tile's keys and values.
template <int kKeys>
struct Sm80Places {
  const char *keys[kKeys], *values[kKeys];
};

// The keys of a pair: exact ones, then slots or those in its runs. A thread asks for keys in
// ascending order, from the one on that its warp has sought.
class Sm80Keys {
 public:
  __device__ Sm80Keys(const Sm80Attend& call, int pair)
      : p_(call.params),
        head_(pair % p_.kv_heads),
        list_(p_.lists.of_heads ? head_ : pair),
        exact_(static_cast<int>(p_.exact - p_.exact_skipped)),
        listed_(p_.lists.totals != nullptr) {
    count_ = exact_ + static_cast<int>(listed_ ? p_.lists.totals[list_].keys : p_.slots);
  }

  __device__ int count() const { return count_; }
  __device__ bool fault() const { return listed_ && p_.lists.totals[list_].fault != 0; }

  __device__ void seek(int key) {
    if (listed_) run_ = run_of(before(), p_.lists.totals[list_].runs, max(key - exact_, 0));
  }

  // The places of a key and its value.
  __device__ void locate(int key, const char*& to_key, const char*& to_value) {
    const bool is_exact = key < exact_;
    const auto selected = static_cast<uint32_t>(key - exact_);
    const int64_t row = is_exact ? head_ * p_.exact + p_.exact_skipped + key
                                 : head_ * p_.slots + (listed_ ? slot_of(selected) : selected);
    to_key = static_cast<const char*>(is_exact ? p_.exact_keys : p_.keys) + row * p_.dim * 2;
    to_value =
        static_cast<const char*>(is_exact ? p_.exact_values : p_.values) + row * p_.value_dim * 2;
  }

 private:
  __device__ const uint32_t* before() const {
    return p_.lists.before + list_ * (p_.lists.capacity + 1);
  }
  __device__ uint32_t slot_of(uint32_t key) {
    while (before()[run_ + 1] <= key) ++run_;
    return p_.lists.first[list_ * (p_.lists.capacity + 1) + run_] + (key - before()[run_]);
  }

  const AttendParams& p_;
  const int head_;
  const int64_t list_;
  const int exact_;
  const bool listed_;
  int count_;
  uint32_t run_ = 0;  // of the last key
};

// A block's threads and its rows in shared memory. A thread has up to 256 dimensions of the values.
template <int kDim, int kValueDim, int kTiles>
struct Sm80AttendTile : Sm80Tile<kDim, kTiles, (kValueDim + 255) / 256> {
  using Base = Sm80Tile<kDim, kTiles, (kValueDim + 255) / 256>;
  static constexpr int kParts = (kValueDim + 255) / 256;
  static constexpr int kValueStride = kValueDim + 8;
  // `wide`: queries in two parts.
  static constexpr int64_t bytes(bool wide) {
    return sm80_bytes<kDim>((wide ? 2 : 1) * Base::kRows + Base::kStream) +
           sm80_bytes<kValueDim>(Base::kStream);
  }
};

template <class Element, int kDim, int kValueDim, int kTiles>
class Sm80Attention {
  using Tile = Sm80AttendTile<kDim, kValueDim, kTiles>;
  static constexpr int kKeyTiles = Tile::kStream / 8, kOutTiles = kValueDim / 8 / Tile::kParts;
  using Logits = float[kTiles][kKeyTiles][4];
  using Softmax = prefill::Softmax<Tile::kStream>;
  using RowEnd = prefill::RowEnd;

 public:
  using Places = Sm80Places<Tile::kStream>;

  __device__ Sm80Attention(const Sm80Attend& call, const Sm80Cut& cut, uint16_t* memory,
                           Places (&places)[2])
      : call_(call),
        p_(call.params),
        places_(places),
        part_(static_cast<int>(blockIdx.x) % cut.parts),
        parts_(cut.parts),
        first_(static_cast<int>(blockIdx.x) / cut.parts % cut.tiles.tiles_of_block *
               cut.tiles.tokens * call.params.group),
        pair_(static_cast<int>(blockIdx.x) / cut.parts / cut.tiles.tiles_of_block),
        block_(block_of(call.blocks, pair_ / call.params.kv_heads)),
        rows_(min(block_.y * call.params.group, first_ + cut.tiles.tokens * call.params.group)),
        keys_(call, pair_),
        wide_(kTiles == 1 && p_.q_dtype != p_.dtype),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32 / Tile::kParts),
        first_out_(static_cast<int>(threadIdx.x) / 32 % Tile::kParts * kOutTiles),
        key_rows_(memory),
        value_rows_(key_rows_ + Tile::kStream * Tile::kStride),
        high_(value_rows_ + Tile::kStream * Tile::kValueStride),
        low_(high_ + Tile::kRows * Tile::kStride) {}

  __device__ void run() {
    if (first_ >= rows_) return;
    load_query_rows<Element, kDim, Tile::kRows, Tile::kThreads>(
        p_.q, p_.q_dtype, p_.dtype,
        [&](int r) -> int64_t { return first_ + r < rows_ ? row_of(first_ + r) * kDim : -1; },
        high_, low_);
    begin_ = static_cast<int>(int64_t{keys_.count()} * part_ / parts_);
    end_ = static_cast<int>(int64_t{keys_.count()} * (part_ + 1) / parts_);
    attend();
    finish();
  }

 private:
  template <int kN>
  __device__ __forceinline__ static float (&flat(float (&x)[kN][4]))[4 * kN] {
    return reinterpret_cast<float(&)[4 * kN]>(x);
  }
  // Row of q, out and lse of row r of the block.
  __device__ int64_t row_of(int r) const {
    const int64_t token = block_.x + r / p_.group;
    return (token * p_.kv_heads + pair_ % p_.kv_heads) * p_.group + r % p_.group;
  }

  __device__ void attend() {
    keys_.seek(begin_);
    if (begin_ < end_) locate(begin_);
    __syncthreads();
    if (begin_ < end_) fetch<kDim>(places_of(begin_).keys, key_rows_);
    const uint16_t* high = high_ + warp_ * Tile::kWarpRows * Tile::kStride;
    const uint16_t* low = low_ + warp_ * Tile::kWarpRows * Tile::kStride;
#pragma unroll 1
    for (int tile = begin_; tile < end_; tile += Tile::kStream) {
      const int next = tile + Tile::kStream;
      arrive();  // the tile's keys; the values before it have been read
      fetch<kValueDim>(places_of(tile).values, value_rows_);
      if (next < end_) locate(next);
      Logits logits = {};
      add_product<Element, kDim>(high, key_rows_, logits);
      if (wide_) add_product<Element, kDim>(low, key_rows_, logits);
      arrive();  // its values; the keys have been read
      if (next < end_) fetch<kDim>(places_of(next).keys, key_rows_);
#pragma unroll
      for (int i = 0; i < 4 * kTiles * kKeyTiles; ++i) {
        float& x = logits[i / 4 / kKeyTiles][i / 4 % kKeyTiles][i % 4];
        x = sound(x * p_.scale);
      }
      if (next > end_ || p_.positions != nullptr) mask(logits, tile);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (softmax_[m].weigh(flat(logits[m]), 1.0f)) softmax_[m].rescale(flat(out_[m]));
      }
      add_values(logits);
    }
  }

  // Waits until the fetched rows are there and every warp has read the rows before them.
  __device__ static void arrive() {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  // Beyond the last key the place is the last one's; mask() gives it no weight.
  __device__ void locate(int tile) {
    if (threadIdx.x >= Tile::kStream) return;
    const int key = tile + static_cast<int>(threadIdx.x);
    Places& to = places_of(tile);
    keys_.locate(min(key, end_ - 1), to.keys[threadIdx.x], to.values[threadIdx.x]);
  }
  __device__ Places& places_of(int tile) const {
    return places_[(tile - begin_) / Tile::kStream % 2];
  }
  template <int kRowDim>
  __device__ void fetch(const char* const (&rows)[Tile::kStream], uint16_t* to) const {
    fetch_rows<kRowDim, Tile::kStream, Tile::kThreads>([&](int r) { return rows[r]; }, to);
    ptx::cp_async_commit_group();
  }

  // The first key that row 8 m + lane / 4 of the warp sees.
  __device__ int first_visible(int m) const {
    if (p_.positions == nullptr) return 0;
    const int r = min(first_ + warp_ * Tile::kWarpRows + 8 * m + lane_ / 4, rows_ - 1);
    const int64_t position = p_.positions[block_.x + r / p_.group] - p_.offset;
    const int64_t first = p_.chunk > 0 ? position / p_.chunk * p_.chunk : position - p_.window + 1;
    return static_cast<int>(min(max(first - p_.exact_position, int64_t{0}), int64_t{end_}));
  }

  // Keys beyond the last one, and those that a row does not see, have no weight.
  __device__ void mask(Logits& x, int tile) const {
#pragma unroll
    for (int m = 0; m < 2 * kTiles; ++m) {
      const int first = first_visible(m);
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        const int key = tile + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
        if (key >= end_ || key < first) x[m / 2][i / 2][m % 2 * 2 + i % 2] = -INFINITY;
      }
    }
  }

  __device__ void add_values(const Logits& weights) {
    const uint32_t at = ptx::shared_address(value_rows_ + lane_ % 16 * Tile::kValueStride +
                                            lane_ / 16 * 8 + 8 * first_out_);
#pragma unroll
    for (int k = 0; k < kKeyTiles / 2; ++k) {
      uint32_t high[kTiles][4], low[kTiles][4];
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const float* pair = &weights[i / 4][2 * k + i % 4 / 2][i % 2 * 2];
        split<Element>(pair[0], pair[1], high[i / 4][i % 4], low[i / 4][i % 4]);
      }
#pragma unroll
      for (int t = 0; t < kOutTiles / 2; ++t) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, at + (16 * k * Tile::kValueStride + t * 16) * 2);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          Element::mma(out_[m][2 * t], high[m], b[0], b[1]);
          Element::mma(out_[m][2 * t + 1], high[m], b[2], b[3]);
          if (!wide_) continue;
          Element::mma(out_[m][2 * t], low[m], b[0], b[1]);
          Element::mma(out_[m][2 * t + 1], low[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int m = 0; m < 2 * kTiles; ++m) {
      RowEnd end = softmax_[m / 2].finish(m % 2, flat(out_[m / 2]));
      const int local = warp_ * Tile::kWarpRows + 8 * m + lane_ / 4, r = first_ + local;
      if (r >= rows_) continue;
      if (keys_.fault()) end = {NAN, NAN};
      // Parts stay for merge_splits().
      const int64_t state = static_cast<int64_t>(blockIdx.x) * Tile::kRows + local;
      float* all_lse = call_.partials + int64_t{gridDim.x} * Tile::kRows * kValueDim;
      const bool part = parts_ > 1;
      void* to = part ? call_.partials : p_.out;
      const int64_t row = part ? state : row_of(r);
#pragma unroll
      for (int t = 0; t < kOutTiles; ++t) {
        const float* out = out_[m / 2][t] + m % 2 * 2;
        store_2(part ? DType::kF32 : p_.q_dtype, out[0] * end.inverse, out[1] * end.inverse, to,
                row * kValueDim + 8 * (first_out_ + t) + 2 * (lane_ % 4));
      }
      if (lane_ % 4 == 0 && first_out_ == 0) (part ? all_lse[state] : p_.lse[row]) = end.lse;
    }
  }

  const Sm80Attend& call_;
  const AttendParams& p_;
  Places (&places_)[2];
  const int part_, parts_, first_, pair_;
  const int2 block_;
  const int rows_;
  Sm80Keys keys_;
  const bool wide_;
  const int lane_, warp_;
  const int first_out_;  // of the tiles of 8 dimensions of the values, this warp's
  uint16_t *key_rows_, *value_rows_, *high_, *low_;
  int begin_ = 0, end_ = 0;
  Softmax softmax_[kTiles];  // of 16 of the warp's rows
  float out_[kTiles][kOutTiles][4] = {};
};

template <class Element, int kDim, int kValueDim, int kTiles>
__global__ void __launch_bounds__(Sm80AttendTile<kDim, kValueDim, kTiles>::kThreads,
                                  Sm80AttendTile<kDim, kValueDim, kTiles>::kBlocks)
    sm80_attend_kernel(const __grid_constant__ Sm80Attend call,
                       const __grid_constant__ Sm80Cut cut) {
  using Attention = Sm80Attention<Element, kDim, kValueDim, kTiles>;
  extern __shared__ __align__(16) uint16_t memory[];
  __shared__ typename Attention::Places places[2];
  Attention(call, cut, memory, places).run();
}

}  // namespace sqz::cuda
