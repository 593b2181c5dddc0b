// A warp weighs a tile of 16 keys, and multiplies weights with values of 16 bits. Rows of 16 bits
// and of 8 bits share this.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/merge.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows, bool kOwn>
class AttendTile : protected AttendMerge<kDim, kRows, kOwn> {
 protected:
  using Base = AttendMerge<kDim, kRows, kOwn>;
  using Base::Base, Base::kHalves, Base::kParts, Base::kTilesOut;
  using Base::lane_, Base::p_, Base::s_;
  using typename Base::State;
  static constexpr int64_t kRowBytes = kDim * 2;
  static constexpr bool kAhead = kDim <= 128;  // a lane has registers for the values of two tiles
  // Logits of this lane's keys of the tile, then weights: keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of
  // lane 4 n + t, for its query rows.
  using Weights = float[kParts][4];

  // Lane 4 n + t: dimensions [64 h + 8 n, + 8) of its keys.
  struct Values {
    uint4 words[4][kHalves];
  };

  __device__ const AttendLayer& layer() const {
    if constexpr (kOwn) return s_.layer;
    return p_;
  }
  // Key i of this lane, of a tile that begins with key `tile`.
  __device__ int key_of(int tile, int i) const {
    return tile + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
  }
  // Whether half h of a row has dimensions of this lane.
  __device__ __forceinline__ bool has_dims(int h) const {
    return kDim % 64 == 0 || 64 * h + 8 * (lane_ / 4) < kDim;
  }

  // Turns the logits x of a tile, which has `left` keys, into weights. rescale(factor of each part)
  // scales whatever else is relative to the maximum.
  template <class Rescale>
  __device__ __forceinline__ void softmax(Weights& x, int64_t left, State& state,
                                          const Rescale& rescale) {
    float top[kParts];
    bool moves = false;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[p][i] = key_of(0, i) < left ? sound(x[p][i]) : -INFINITY;
      top[p] = fmaxf(fmaxf(x[p][0], x[p][1]), fmaxf(x[p][2], x[p][3]));
      top[p] = fmaxf(top[p], __shfl_xor_sync(~0u, top[p], 1));
      top[p] = fmaxf(top[p], __shfl_xor_sync(~0u, top[p], 2));
      moves = moves || top[p] > state.maximum[p];
    }
    if (__any_sync(~0u, moves)) {
      float factor[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float grown = fmaxf(state.maximum[p], top[p]);
        factor[p] = ptx::ex2_approx(state.maximum[p] - grown);
        state.maximum[p] = grown;
        state.sum[p] *= factor[p];
      }
#pragma unroll
      for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state.out[i][j] *= factor[Base::part_of(j)];
      }
      rescale(factor);
    }
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      float& weight = x[i / 4][i % 4];
      weight = ptx::ex2_approx(weight - state.maximum[i / 4]);
      state.sum[i / 4] += weight;
    }
  }

  // Weights as the A side of products, as queries are: rounded, and the rest.
  template <class Type>
  __device__ __forceinline__ static void split_weights(const Weights& x, uint32_t (&a)[kParts][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        uint32_t& rest = kParts == 1 ? a[0][2 * i + 1] : a[kParts - 1][2 * i + p];
        split<Type>(x[p][2 * i], x[p][2 * i + 1], a[0][2 * i + p], rest);
      }
    }
  }

  __device__ __forceinline__ void add_values(const Weights& x, const Values& values, State& state) {
    uint32_t weights[kParts][4];
    split_weights<Element>(x, weights);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const auto word = [&](int key) { return (&values.words[key][h].x)[w]; };
        // Pairs of keys of one dimension, from pairs of dimensions of one key.
        const uint32_t b[2][2] = {
            {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(2), word(3), 0x5410)},
            {__byte_perm(word(0), word(1), 0x7632), __byte_perm(word(2), word(3), 0x7632)}};
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          Element::mma(state.out[8 * h + 2 * w], weights[p], b[0][0], b[0][1]);
          Element::mma(state.out[8 * h + 2 * w + 1], weights[p], b[1][0], b[1][1]);
        }
      }
    }
  }
};

}  // namespace sqz::cuda
