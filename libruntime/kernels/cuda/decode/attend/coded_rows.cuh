// Rows of 8 bits: a key is the mean of its cluster plus codes times a scale, and so is a value. The
// logit of the mean key, and the product of the mean value with the sum of the weights, are worked
// out once a cluster and not once a key.
#pragma once

#include "libruntime/kernels/cuda/common/rows8.cuh"
#include "libruntime/kernels/cuda/decode/attend/tile.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/lane.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows, bool kOwn>
class AttendCodes : protected AttendTile<Element, kDim, kRows, true, kOwn> {
 protected:
  using Base = AttendTile<Element, kDim, kRows, true, kOwn>;
  using Base::Base, Base::kHalves, Base::kParts, Base::kRowBytes;
  using Base::lane_, Base::listed_, Base::s_, Base::thread_, Base::warp_;
  using typename Base::State, typename Base::Values, typename Base::Weights;

  // There are two lists of keys: one is attended to, the other is the next. Its slots are written
  // first, then fetch_list() asks for the clusters and scales of its `count` keys, and
  // complete_list() waits for them, before the lists change places.
  __device__ CodedKey* next_list() const { return s_.in.coded[1 - list_]; }
  __device__ void fetch_list(int head, int count) const {
    const AttendLayer& layer = this->layer();
#pragma unroll 4
    for (int k = thread_; k < count; k += kAttendThreads) {
      CodedKey& to = next_list()[k];
      const int64_t row = head * layer.slots + to.slot;
      const auto copy = [](const void* field, const void* from) {
        ptx::cp_async_4(ptx::shared_address(field), from);
      };
      copy(&to.cluster, layer.coded.clusters + row);
      // A copy has four bytes, which are two scales.
      copy(&to.key_scale, static_cast<const uint16_t*>(layer.coded.keys.scales) + (row & ~1));
      copy(&to.value_scale, static_cast<const uint16_t*>(layer.coded.values.scales) + (row & ~1));
    }
    ptx::cp_async_commit_group();
  }
  // Behind the last key are copies of it, to the end of its range.
  __device__ void complete_list(int head, int count) {
    const AttendLayer& layer = this->layer();
    ptx::cp_async_wait_group<0>();
#pragma unroll 4
    for (int k = thread_; k < count; k += kAttendThreads) {
      CodedKey key = next_list()[k];
      const bool odd = ((head * layer.slots + key.slot) & 1) != 0;
      const auto scale = [&](float pair) {
        const uint32_t words = __float_as_uint(pair);
        return odd ? Element::high(words) : Element::low(words);
      };
      const bool first = (key.cluster & kFirstSlot) != 0;
      key = {key.slot, key.cluster & ~kFirstSlot, scale(key.key_scale), scale(key.value_scale)};
      next_list()[k] = key;
      for (int more = k + 1; k == count - 1 && more % kRange != 0; ++more) {
        next_list()[more] = key;
      }
      if (!first) continue;
      ++means_;
      const int64_t row = (int64_t{head} * layer.coded.count + key.cluster) * kRowBytes;
#pragma unroll
      for (int line = 0; line < kRowBytes; line += 128) {
        ptx::prefetch_l2(static_cast<const char*>(layer.coded.mean_keys) + row + line);
        ptx::prefetch_l2(static_cast<const char*>(layer.coded.mean_values) + row + line);
      }
    }
    list_ = 1 - list_;
  }
  // A lookup has read the mean keys, not the mean values.
  __device__ void count_means(bool looked_up) {
    const uint32_t means = __reduce_add_sync(~0u, means_) * (looked_up ? 1 : 2);
    if (lane_ == 0 && means > 0 && this->layer().counters != nullptr) {
      atomicAdd(this->layer().counters + 2, static_cast<unsigned long long>(means));
    }
    means_ = 0;
  }

  // The first `count` keys of the list. A warp has a range of them, which it goes through in
  // stretches of at most kTableClusters clusters.
  __device__ void attend_codes(int head, int count, State& state) {
    const int each = (count + kAttendWarps * kRange - 1) / (kAttendWarps * kRange) * kRange;
    const int begin = ptx::uniform(warp_ * each), end = ptx::uniform(min(count, begin + each));
    const Bases from = bases(head);
#pragma unroll 1
    for (int at = begin; at < end;) {
      Codes codes;
      load_keys(from, at, codes);
      int clusters = 0;
      const int stop = ptx::uniform(number_clusters(at, end, clusters));
      clusters = ptx::uniform(clusters);
      multiply_means(from, clusters);
      attend_stretch(from, at, stop, codes, state);
      add_means(from, clusters, state);
      at = stop;
    }
  }

 private:
  static constexpr int kRange = 32;  // a warp has so many keys of a list, or a multiple
  // Keys of a tile. A product of bytes adds up 32; half of them are zeros where a lane has too few
  // registers.
  static constexpr int kTile = kDim * kParts <= 128 ? 32 : 16;
  static constexpr int kLaneKeys = kTile / 4;    // a lane's of a tile, as key_of() numbers them
  using TileWeights = float[kParts][kLaneKeys];  // as Weights, of more keys
  using Codes = RowPart8<kDim>[kTile / 8];
  // A lane's dimensions of each of its keys, as in Values.
  struct ValueCodes {
    uint2 words[kLaneKeys][kHalves];
  };
  using TileKeys = CodedKey[kLaneKeys];

  // The rows of a head. A lane has a quarter of keys lane / 4, lane / 4 + 8, … of a tile, and
  // dimensions of the values of key_of(): its pointers to codes count from these.
  struct Bases {
    const char *keys, *mean_keys, *values, *mean_values;
  };
  __device__ Bases bases(int head) const {
    const AttendLayer& layer = this->layer();
    const auto at = [&](const void* rows, int64_t row, int64_t bytes) {
      return static_cast<const char*>(rows) + row * bytes;
    };
    const int64_t slot = head * layer.slots, cluster = int64_t{head} * layer.coded.count;
    const char* values = at(layer.coded.values.codes, slot, kDim) + this->first_dim(0, lane_ / 4);
    return {ptx::kept(at(layer.coded.keys.codes, slot, kDim) + 16 * (lane_ % 4)),
            at(layer.coded.mean_keys, cluster, kRowBytes), ptx::kept(values),
            at(layer.coded.mean_values, cluster, kRowBytes)};
  }
  __device__ CodedKey* keys() const {
    return s_.in.coded[list_];
  }

  __device__ __forceinline__ void load_keys(const Bases& from, int tile, Codes& to) const {
#pragma unroll
    for (int t = 0; t < kTile / 8; ++t) {
      to[t].load(from.keys + uint64_t{keys()[tile + 8 * t + lane_ / 4].slot} * kDim, lane_);
    }
  }
  __device__ __forceinline__ void load_values(const Bases& from, int tile, ValueCodes& to) const {
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const char* row = from.values + uint64_t{keys()[this->key_of(tile, i)].slot} * kDim;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        if constexpr (Base::kPairs) {
          if (h % 2 != 0) continue;
          const uint4 both = this->has_dims(h) ? load_stream(row + 64 * h) : make_uint4(0, 0, 0, 0);
          to.words[i][h] = make_uint2(both.x, both.y);
          to.words[i][h + 1] = make_uint2(both.z, both.w);
        } else {
          to.words[i][h] = this->has_dims(h) ? load_stream_8(row + 64 * h) : make_uint2(0, 0);
        }
      }
    }
  }

  // Numbers the clusters of keys [begin, end) of the list by their places in the warp's table.
  // Returns where the stretch ends: at `end`, or with 32 keys behind which they no longer fit.
  __device__ int number_clusters(int begin, int end, int& clusters) {
    constexpr int kSteps = coded_keys(kRows) / (kAttendWarps * 32);  // of the largest range
    static_assert(kTableClusters >= 32 && kRange % 32 == 0);
    uint32_t own[kSteps], all[kSteps];  // all: a bit for each key that begins a cluster
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = begin + 32 * i + lane_;
      all[i] = 0;
      if (begin + 32 * i >= end) continue;
      own[i] = keys()[at].cluster;
      const bool first = i == 0 && lane_ == 0;
      all[i] = __ballot_sync(~0u, first || own[i] != keys()[at - 1].cluster);
    }
    __syncwarp();
    int at = begin;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (at != begin + 32 * i || at >= end || clusters + __popc(all[i]) > kTableClusters) continue;
      const int number = clusters + __popc(all[i] << (31 - lane_)) - 1;
      if ((all[i] >> lane_ & 1) != 0) s_.in.clusters[warp_][number] = own[i];
      keys()[at + lane_].cluster = static_cast<uint32_t>(number);
      clusters += __popc(all[i]);
      at += 32;
    }
    __syncwarp();
    return min(at, end);
  }

  // Writes the logits of mean keys into the table, and zeros for the sums of weights.
  __device__ void multiply_means(const Bases& from, int clusters) {
    const uint32_t* numbers = s_.in.clusters[warp_];
#pragma unroll 1
    for (int first = 0; first < clusters; first += kTileKeys) {
      RowPart<kDim> rows[2] = {};
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (first + 8 * t >= clusters) continue;
        const uint32_t cluster = numbers[min(first + 8 * t + lane_ / 4, clusters - 1)];
        rows[t].load_kept(from.mean_keys + uint64_t{cluster} * kRowBytes, lane_);
      }
      float d[2][4] = {};
      multiply_rows<Element>(s_.in.queries, rows, lane_, d);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = this->key_of(first, i), row = lane_ / 4 + 8 * p;
          s_.in.logits[warp_][at][row] = product_of<kRows>(d[i / 2], p, i % 2);
          s_.in.weights[warp_][at][row] = 0;
        }
      }
    }
    __syncwarp();
  }

  // x: the logits of a tile's keys.
  __device__ __forceinline__ void multiply_keys(const TileKeys& own, const Codes& codes,
                                                const float (&scales)[kParts],
                                                TileWeights& x) const {
    int sums[kTile / 8][kParts][2];
    multiply_codes(s_.in.query_codes, codes, lane_, sums);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const float* means = s_.in.logits[warp_][own[i].cluster] + lane_ / 4;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const auto sum = static_cast<float>(sums[i / 2][p][i % 2]);
        x[p][i] = fmaf(own[i].key_scale * scales[p], sum, means[8 * p]);
      }
    }
  }

  // `codes`: of the first tile's keys. The next tile's and this one's values are on their way while
  // keys are weighed. They are asked for at one place: the compiler has one scoreboard for both, so
  // that a wait is for all of them.
  __device__ void attend_stretch(const Bases& from, int begin, int end, Codes& codes,
                                 State& state) {
    float scales[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) scales[p] = s_.in.query_codes.scales[lane_ / 4 + 8 * p];
#pragma unroll 1
    for (int tile = begin; tile < end; tile += kTile) {
      const int next = tile + kTile;
      TileKeys own;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) own[i] = keys()[this->key_of(tile, i)];
      TileWeights x;
      multiply_keys(own, codes, scales, x);
      ValueCodes values;
      load_values(from, tile, values);
      if (next < end) load_keys(from, next, codes);
      this->softmax(x, end - tile, state, [&](const float(&factor)[kParts]) { rescale(factor); });
      add_to_clusters(tile, own, x);
      add_codes(own, x, values, state);
    }
  }

  // Scales all sums of the table, wanted or not: the compiler waits for all loads before a loop
  // over those that are.
  __device__ __forceinline__ void rescale(const float (&factor)[kParts]) {
#pragma unroll
    for (int first = 0; first < kTableClusters; first += 4) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        s_.in.weights[warp_][first + lane_ % 4][lane_ / 4 + 8 * p] *= factor[p];
      }
    }
    __syncwarp();
  }

  // Adds a tile's weights to the sums of its clusters: products with a matrix that has a one where
  // a key is in a cluster, of 8 clusters at a time.
  __device__ __forceinline__ void add_to_clusters(int tile, const TileKeys& own,
                                                  const TileWeights& weights) {
    constexpr uint32_t kOne = 0x3F80;
    uint32_t a[kTile / 16][kParts][4];
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      this->template split_weights<Bf16>(weights, a[k], 4 * k);
    }
    const uint32_t last = keys()[tile + kTile - 1].cluster;
#pragma unroll 1
    for (uint32_t first = keys()[tile].cluster; first <= last; first += 8) {
      const auto ones = [&](int i) {
        const uint32_t column = first + lane_ / 4;
        return (own[i].cluster == column ? kOne : 0) |
               (own[i + 1].cluster == column ? kOne << 16 : 0);
      };
      float d[4] = {};
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) Bf16::mma(d, a[k][p], ones(4 * k), ones(4 * k + 2));
      }
#pragma unroll
      for (int i = 0; i < 2 * kParts; ++i) {
        const uint32_t cluster = first + 2 * (lane_ % 4) + i % 2;
        if (cluster > last) continue;
        s_.in.weights[warp_][cluster][lane_ / 4 + i / 2 * 8] += product_of<kRows>(d, i / 2, i % 2);
      }
    }
    __syncwarp();
  }

  // Adds codes times weights, which are in fixed point: a row's of a tile have one scale.
  __device__ __forceinline__ void add_codes(const TileKeys& own, TileWeights& x,
                                            const ValueCodes& values, State& state) {
    constexpr float kLeastWeight = 1e-34f;  // of a tile: its inverse is finite
    uint32_t a[kParts][4] = {};
    float scales[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) x[p][i] *= own[i].value_scale;
      const float most = this->most_of(x[p]);
      const float inverse = most > kLeastWeight ? __fdividef(kMostFixed, most) : 0;
      scales[p] = most * (1 / kMostFixed);
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        int numbers[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers[i] = __float2int_rn(x[p][4 * k + i] * inverse);
        split_fixed(numbers, a[0][2 * k + p], this->rest_of(a, k, p));
      }
    }
#pragma unroll
    for (int dims = 0; dims < 2 * kHalves; ++dims) {  // four of the lane's dimensions
      uint32_t b[4][2] = {};
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        const auto word = [&](int i) { return (&values.words[4 * k + i][dims / 2].x)[dims % 2]; };
        // Four keys of a dimension, from four dimensions of a key.
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t selector = pair == 0 ? 0x5140 : 0x7362;
          const uint32_t upper = __byte_perm(word(0), word(1), selector);
          const uint32_t lower = __byte_perm(word(2), word(3), selector);
          b[2 * pair][k] = __byte_perm(upper, lower, 0x5410);
          b[2 * pair + 1][k] = __byte_perm(upper, lower, 0x7632);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int d[kParts][4] = {};
#pragma unroll
        for (int p = 0; p < kParts; ++p) ptx::mma_m16n8k32_s8(d[p], a[p], b[j][0], b[j][1]);
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) {
          const int sum = product_of<kRows>(d[0], d[kParts - 1], i / 2, i % 2);
          float& out = state.out[4 * dims + j][i];
          out = fmaf(static_cast<float>(sum), scales[i / 2], out);
        }
      }
    }
  }

  // Adds mean values times the sums of weights.
  __device__ void add_means(const Bases& from, int clusters, State& state) {
#pragma unroll 1
    for (int first = 0; first < clusters; first += kTileKeys) {
      Values means;
      Weights sums;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = this->key_of(first, i);
        const uint32_t cluster = s_.in.clusters[warp_][min(at, clusters - 1)];
        const char* row = from.mean_values + uint64_t{cluster} * kRowBytes;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const char* dims = row + 2 * this->first_dim(h, lane_ / 4);
          means.words[i][h] = this->has_dims(h) ? load_kept(dims) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          sums[p][i] = s_.in.weights[warp_][at][lane_ / 4 + 8 * p];
        }
      }
      this->add_values(sums, means, state);
    }
    __syncwarp();
  }

  int list_ = 0;        // that is attended to
  uint32_t means_ = 0;  // of this thread's keys, that are a cluster's first
};

}  // namespace sqz::cuda
