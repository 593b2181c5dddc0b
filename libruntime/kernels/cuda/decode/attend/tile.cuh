// A warp weighs a tile of 16 or 32 keys, and multiplies weights with values of 16 bits. Rows of 16
// bits and of 8 bits share this.
#pragma once

#include "libruntime/kernels/cuda/decode/attend/merge.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows, bool kCoded, bool kOwn>
class AttendTile : protected AttendMerge<kDim, kRows, kCoded, kOwn> {
 protected:
  using Base = AttendMerge<kDim, kRows, kCoded, kOwn>;
  using Base::Base, Base::first_dim, Base::kHalves, Base::kOut, Base::kParts, Base::kTilesOut;
  using Base::lane_, Base::p_, Base::s_;
  using typename Base::State;
  static constexpr int64_t kRowBytes = kDim * 2;
  static constexpr bool kAhead = kDim <= 128;  // a lane has registers for the values of two tiles
  // Logits of this lane's keys of the tile, then weights: keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of
  // lane 4 n + t, for its query rows.
  using Weights = float[kParts][4];

  // Lane 4 n + t: eight dimensions of its keys, from first_dim(h, n) on.
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
    return kDim % 64 == 0 || first_dim(h, lane_ / 4) < kDim;
  }

  // Turns the logits x of a tile of 4 kCount keys, the first `left` of which count, into weights.
  // rescale(factor of each part) scales whatever else is relative to the maximum.
  template <int kCount, class Rescale>
  __device__ __forceinline__ void softmax(float (&x)[kParts][kCount], int64_t left, State& state,
                                          const Rescale& rescale) {
    float top[kParts];
    bool moves = false;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      // A logit that overflowed to -infinity has no weight and would go unseen: 0 * x is NaN then.
#pragma unroll
      for (int i = 0; i < kCount; ++i) state.sum[p] += 0 * x[p][i];
      if (left < 4 * kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[p][i] = key_of(0, i) < left ? x[p][i] : -INFINITY;
      }
      top[p] = most_of(x[p]);
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
        for (int j = 0; j < kOut; ++j) state.out[i][j] *= factor[Base::part_of(j)];
      }
      rescale(factor);
    }
#pragma unroll
    for (int i = 0; i < kCount * kParts; ++i) {
      float& weight = x[i / kCount][i % kCount];
      weight = ptx::ex2_approx(weight - state.maximum[i / kCount]);
      state.sum[i / kCount] += weight;
    }
  }
  // The largest of a row's numbers, which four lanes have.
  template <int kCount>
  __device__ __forceinline__ static float most_of(const float (&x)[kCount]) {
    float most = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) most = fmaxf(most, x[i]);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }

  // On the A side of products, as of queries, this word has what a[0][2 i + p] lost by rounding.
  __device__ __forceinline__ static uint32_t& rest_of(uint32_t (&a)[kParts][4], int i, int p) {
    return kParts == 1 ? a[0][2 * i + 1] : a[kParts - 1][2 * i + p];
  }
  // Weights of 16 keys as the A side of products.
  template <class Type, int kCount>
  __device__ __forceinline__ static void split_weights(const float (&x)[kParts][kCount],
                                                       uint32_t (&a)[kParts][4], int first = 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float* pair = &x[p][first + 2 * i];
        split<Type>(pair[0], pair[1], a[0][2 * i + p], rest_of(a, i, p));
      }
    }
  }

  // out += a b
  __device__ __forceinline__ static void multiply(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                  float (&out)[kOut]) {
    if constexpr (kOut == 4) {
      Element::mma(out, a, b[0], b[1]);
    } else {
      float d[4] = {};
      Element::mma(d, a, b[0], b[1]);
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] += product_of<kRows>(d, 0, i);
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
          multiply(weights[p], b[0], state.out[8 * h + 2 * w]);
          multiply(weights[p], b[1], state.out[8 * h + 2 * w + 1]);
        }
      }
    }
  }
};

}  // namespace sqz::cuda
