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
class AttendCodes : protected AttendTile<Element, kDim, kRows, kOwn> {
 protected:
  using Base = AttendTile<Element, kDim, kRows, kOwn>;
  using Base::Base, Base::kAhead, Base::kHalves, Base::kParts, Base::kRowBytes;
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
      Loaded loaded;
      load_keys(from, at, loaded);
      load_values(from, at, loaded);
      int clusters = 0;
      const int stop = ptx::uniform(number_clusters(at, end, clusters));
      clusters = ptx::uniform(clusters);
      multiply_means(from, clusters);
      attend_stretch(from, at, stop, loaded, state);
      add_means(from, clusters, state);
      at = stop;
    }
  }

 private:
  static constexpr int kRange = 32;  // a warp has so many keys of a list, or a multiple
  // A lane's 8 dimensions of each of its keys, as in Values.
  struct Codes {
    uint2 words[4][kHalves];
  };
  // Keys and values of a tile.
  struct Loaded {
    RowPart8<kDim> keys[2];
    Codes values;
  };

  // The rows of a head. A lane has a quarter of keys lane / 4 and lane / 4 + 8 of a tile, and 8
  // dimensions of the values of key_of(), from which its pointers to values count.
  struct Bases {
    const char *keys, *mean_keys, *values, *mean_values;
  };
  __device__ Bases bases(int head) const {
    const AttendLayer& layer = this->layer();
    const auto at = [&](const void* rows, int64_t row, int64_t bytes) {
      return static_cast<const char*>(rows) + row * bytes;
    };
    const int64_t slot = head * layer.slots, cluster = int64_t{head} * layer.coded.count;
    return {at(layer.coded.keys.codes, slot, kDim), at(layer.coded.mean_keys, cluster, kRowBytes),
            at(layer.coded.values.codes, slot, kDim) + 8 * (lane_ / 4),
            at(layer.coded.mean_values, cluster, kRowBytes) + 16 * (lane_ / 4)};
  }
  __device__ CodedKey* keys() const {
    return s_.in.coded[list_];
  }
  __device__ __forceinline__ const CodedKey& key(int tile, int i) const {
    return keys()[this->key_of(tile, i)];
  }

  __device__ __forceinline__ void load_keys(const Bases& from, int tile, Loaded& to) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      to.keys[t].load(from.keys + uint64_t{keys()[tile + 8 * t + lane_ / 4].slot} * kDim, lane_);
    }
  }
  __device__ __forceinline__ void load_values(const Bases& from, int tile, Loaded& to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* row = from.values + uint64_t{key(tile, i).slot} * kDim;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        to.values.words[i][h] = this->has_dims(h) ? load_stream_8(row + 64 * h) : make_uint2(0, 0);
      }
    }
  }

  // Numbers the clusters of keys [begin, end) of the list by their places in the warp's table.
  // Returns where the stretch ends: at `end`, or with 32 keys behind which they no longer fit.
  __device__ int number_clusters(int begin, int end, int& clusters) {
    static_assert(kTableClusters >= 32 && kRange % 32 == 0);
    uint32_t last = ~0u;  // cluster of the key before
    int at = begin;
#pragma unroll 1
    for (; at < end; at += 32) {
      const uint32_t cluster = keys()[at + lane_].cluster;
      const uint32_t below = __shfl_up_sync(~0u, cluster, 1);
      const bool begins = cluster != (lane_ == 0 ? last : below);
      const uint32_t all = __ballot_sync(~0u, begins);
      if (clusters + __popc(all) > kTableClusters) break;
      const int number = clusters + __popc(all << (31 - lane_)) - 1;
      if (begins) s_.in.clusters[warp_][number] = cluster;
      keys()[at + lane_].cluster = static_cast<uint32_t>(number);
      clusters += __popc(all);
      last = __shfl_sync(~0u, cluster, 31);
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
  __device__ __forceinline__ void multiply_keys(int tile, const Loaded& loaded,
                                                const float (&scales)[kParts], Weights& x) const {
    int sums[2][kParts][2];
    multiply_codes(s_.in.query_codes, loaded.keys, lane_, sums);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const CodedKey& own = key(tile, i);
      const float* means = s_.in.logits[warp_][own.cluster] + lane_ / 4;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const auto sum = static_cast<float>(sums[i / 2][p][i % 2]);
        x[p][i] = fmaf(own.key_scale * scales[p], sum, means[8 * p]);
      }
    }
  }

  // The next tile's keys and values are on their way while this one's are worked on. They are asked
  // for at one place: the compiler has one scoreboard for both, so that a wait is for all of them.
  __device__ void attend_stretch(const Bases& from, int begin, int end, Loaded& loaded,
                                 State& state) {
    float scales[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) scales[p] = s_.in.query_codes.scales[lane_ / 4 + 8 * p];
#pragma unroll 1
    for (int tile = begin; tile < end; tile += kTileKeys) {
      const int next = tile + kTileKeys;
      Weights x;
      multiply_keys(tile, loaded, scales, x);
      const Codes values = loaded.values;
      if (next < end) {
        load_keys(from, next, loaded);
        if (kAhead) load_values(from, next, loaded);
      }
      this->softmax(x, end - tile, state, [&](const float(&factor)[kParts]) { rescale(factor); });
      add_to_clusters(tile, x);
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) x[i / 4][i % 4] *= key(tile, i % 4).value_scale;
      add_codes(x, values, state);
      if (!kAhead && next < end) load_values(from, next, loaded);
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
  __device__ __forceinline__ void add_to_clusters(int tile, const Weights& weights) {
    constexpr uint32_t kOne = 0x3F80;
    uint32_t a[kParts][4];
    this->template split_weights<Bf16>(weights, a);
    const uint32_t last = keys()[tile + kTileKeys - 1].cluster;
#pragma unroll 1
    for (uint32_t first = keys()[tile].cluster; first <= last; first += 8) {
      const auto ones = [&](int i) {
        const uint32_t column = first + lane_ / 4;
        return (key(tile, i).cluster == column ? kOne : 0) |
               (key(tile, i + 1).cluster == column ? kOne << 16 : 0);
      };
      float d[4] = {};
#pragma unroll
      for (int p = 0; p < kParts; ++p) Bf16::mma(d, a[p], ones(0), ones(2));
#pragma unroll
      for (int i = 0; i < 2 * kParts; ++i) {
        const uint32_t cluster = first + 2 * (lane_ % 4) + i % 2;
        if (cluster > last) continue;
        s_.in.weights[warp_][cluster][lane_ / 4 + i / 2 * 8] += product_of<kRows>(d, i / 2, i % 2);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void add_codes(const Weights& weights, const Codes& values,
                                            State& state) {
    uint32_t a[kParts][4];
    this->template split_weights<Bf16>(weights, a);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // Pairs of keys of two dimensions, from four dimensions of one key.
        const auto word = [&](int i) { return (&values.words[i][h].x)[w / 2]; };
        const uint32_t selector = w % 2 == 0 ? 0x5140 : 0x7362;
        const uint32_t upper = __byte_perm(word(0), word(1), selector);
        const uint32_t lower = __byte_perm(word(2), word(3), selector);
        const uint32_t b[2][2] = {{bf16_of_bytes<0>(upper), bf16_of_bytes<0>(lower)},
                                  {bf16_of_bytes<1>(upper), bf16_of_bytes<1>(lower)}};
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          Bf16::mma(state.out[8 * h + 2 * w], a[p], b[0][0], b[0][1]);
          Bf16::mma(state.out[8 * h + 2 * w + 1], a[p], b[1][0], b[1][1]);
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
          means.words[i][h] = this->has_dims(h) ? load_kept(row + 128 * h) : make_uint4(0, 0, 0, 0);
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
