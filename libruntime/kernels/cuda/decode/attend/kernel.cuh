// Blocks share the keys of all pairs evenly. The part of one pair that a block has is a segment;
// its 8 warps take tiles of 16 keys in turn, keys and values going from memory straight to
// registers.
#pragma once

#include "libruntime/kernels/cuda/common/rows8.cuh"
#include "libruntime/kernels/cuda/common/run_search.cuh"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/attend/merge.cuh"
#include "libruntime/kernels/cuda/decode/context_layer.cuh"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

// kRows: query rows that a pair has at most. kCoded: keys and values are rows of 8 bits. kOwn: the
// requests have layers of their own.
template <class Element, int kDim, int kRows, bool kCoded, bool kOwn>
class Attend : private AttendMerge<kDim, kRows, kOwn> {
 public:
  __device__ Attend(const AttendParams& params, AttendShared<kDim, kRows>& shared)
      : AttendMerge<kDim, kRows, kOwn>(params, shared), queries_(params.q) {}

  __device__ void run() {
    ptx::griddepcontrol_launch_dependents();
    fetch_queries();
    __syncthreads();
    ptx::griddepcontrol_wait();
    if (thread_ == 0 && blockIdx.x == 0 && !listed_ && p_.counters != nullptr) {
      atomicAdd(p_.counters, static_cast<unsigned long long>(p_.requests));
    }
    Segment segment;
    int64_t at = 0, end = 0;
    int pair = 0;
    bool more = false;
    const bool by_pairs = this->split_by_pairs(segment, more);
    if (!by_pairs) {
      pair = this->split_evenly(at, end);
      more = at < end;
    }
#pragma unroll 1
    while (more) {
      if (!by_pairs) at = this->segment_of(pair++, at, end, segment);
      attend_segment(segment);
      more = !by_pairs && at < end;
    }
  }

 private:
  using Merge = AttendMerge<kDim, kRows, kOwn>;
  using Merge::kHalves;
  using Merge::kParts;
  using Merge::kTilesOut;
  using Merge::lane_;
  using Merge::listed_;
  using Merge::p_;
  using Merge::pairs_;
  using Merge::s_;
  using Merge::thread_;
  using Merge::warp_;
  using typename Merge::Segment;
  using typename Merge::State;
  static constexpr int64_t kRowBytes = kDim * 2;
  using Weights = float[kParts][4];  // of 4 keys

  __device__ void attend_segment(const Segment& segment) {
    head_ = segment.pair % p_.kv_heads;
    if constexpr (kOwn) {
      const ContextLayer& own = p_.own[segment.pair / p_.kv_heads];
      copy_layer(own.keys, s_.layer);
      own_exact_ = segment.totals.exact;
      whole_ = kCoded && own.lookup.levels == 0;
    }
    const int64_t count = segment.end;
    const bool list = listed_ || kCoded;
    const int64_t step = kCoded ? kCodedKeys : list ? kListKeys : segment.end - segment.begin;
    Runs runs;
    if (listed_) runs = runs_from(segment, segment.begin);  // on their way beside the queries
    load_queries(segment.pair);
    if (kOwn) __syncthreads();
    State state = {};
#pragma unroll
    for (float& maximum : state.maximum) maximum = kLowestMaximum;
    int64_t stop;
    for (int64_t at = segment.begin; at < count; at = stop) {
      stop = min(at + step, count);
      if (kCoded && at < exact()) {
        stop = min(count, exact());
        __syncthreads();
        attend_keys(at, stop, false, state);
        continue;
      }
      if (at > segment.begin) {
        __syncthreads();
        if (listed_) runs = runs_from(segment, at);
      }
      if (list) locate(segment, at, stop, runs);
      __syncthreads();
      if constexpr (kCoded) {
        complete(stop - at);
        attend_codes(static_cast<int>(stop - at), state);
      } else {
        attend_keys(at, stop, list, state);
      }
    }
    if constexpr (kCoded) count_means();
    this->finish_segment(segment, state);
  }

  __device__ const AttendLayer& layer() const {
    if constexpr (kOwn) return s_.layer;
    return p_;
  }
  __device__ int64_t exact() const {
    return kOwn ? own_exact_ : Merge::exact_;
  }

  // All queries, while the lookup that this kernel waits for still runs: it began when they were
  // there, and no block of this kernel begins before.
  __device__ void fetch_queries() {
    const int64_t bytes = int64_t{pairs_} * p_.group * kDim * (p_.q_dtype == DType::kF32 ? 4 : 2);
    const bool aligned = reinterpret_cast<uintptr_t>(p_.q) % 16 == 0;
    if (!p_.after_lookup || bytes > early_bytes(kDim) || !aligned) return;
    for (int64_t i = thread_; i < bytes / 16; i += kAttendThreads) {
      s_.early[i] = __ldcg(static_cast<const uint4*>(p_.q) + i);
    }
    queries_ = s_.early;
  }

  __device__ void load_queries(int pair) {
    const int64_t first = static_cast<int64_t>(pair) * p_.group;
    make_query_rows<Element>(s_.in.queries, p_.group, thread_, kAttendThreads,
                             [&](int row, int chunk, float(&x)[8]) {
                               load_8(p_.q_dtype, queries_, (first + row) * kDim + chunk * 8, x);
#pragma unroll
                               for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                             });
    if constexpr (kCoded) {
      make_query_rows<Bf16>(s_.in.queries_8, p_.group, thread_, kAttendThreads,
                            [&](int row, int block, float(&x)[8]) {
                              const int64_t dims = RowPart8<kDim>::dims_of(block) * 8;
                              load_8(p_.q_dtype, queries_, (first + row) * kDim + dims, x);
#pragma unroll
                              for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                            });
    }
  }

  // ---- Where keys are.

  // Runs of a segment's pair. Lane i of warp w has runs 8 i + w of 256, and of the 256 after these.
  struct Runs {
    uint32_t at;
    uint32_t first[2], begin[2], end[2];  // begin: ~0 beyond the last
  };
  static constexpr uint32_t kWindow = kAttendThreads;
  static constexpr uint32_t kFewRuns = 2 * kWindow;  // all are fetched, and none is sought

  // From the one with key `begin` of the segment, or an earlier one. By all lanes of a warp.
  __device__ Runs runs_from(const Segment& segment, int64_t begin) const {
    const RunLists& lists = p_.lists;
    const auto key = static_cast<uint32_t>(max(begin, exact()) - exact());
    Runs runs = {.at = 0};
    if (segment.totals.runs > kFewRuns && key < segment.totals.keys) {
      const int64_t list = this->list_of(segment.pair) * (lists.capacity + 1);
      runs.at = run_of(lists.before + list, segment.totals.runs, key);
    }
    load_runs(segment, 0, runs);
    load_runs(segment, 1, runs);
    return runs;
  }
  __device__ __forceinline__ void load_runs(const Segment& segment, int half, Runs& runs) const {
    const int64_t list = this->list_of(segment.pair) * (p_.lists.capacity + 1);
    const uint32_t run = runs.at + half * kWindow + warp_ + lane_ * kAttendWarps;
    const bool is = run < segment.totals.runs;
    runs.first[half] = is ? p_.lists.first[list + run] : 0;
    runs.begin[half] = is ? p_.lists.before[list + run] : ~0u;
    runs.end[half] = is ? p_.lists.before[list + run + 1] : 0;
  }

  // Fills s_.in.list for keys [begin, end): slots, or exact keys with kExactKey.
  __device__ void locate(const Segment& segment, int64_t begin, int64_t end, Runs& runs) {
    const int64_t exact_end = min(end, exact());
#pragma unroll 1
    for (int64_t k = begin + thread_; k < exact_end; k += kAttendThreads) {
      put(begin, k, exact_key(k));
    }
    if (end <= exact()) return;
    const auto first_key = static_cast<uint32_t>(max(begin, exact()) - exact());
    const auto end_key = static_cast<uint32_t>(end - exact());
    if (!listed_) {
#pragma unroll 1
      for (uint32_t key = first_key + thread_; key < end_key; key += kAttendThreads) {
        put(begin, exact() + key, key);
      }
      return;
    }
#pragma unroll 1
    while (!put_runs(begin, first_key, end_key, runs)) {
      runs.at += kWindow;
      runs.first[0] = runs.first[1];
      runs.begin[0] = runs.begin[1];
      runs.end[0] = runs.end[1];
      load_runs(segment, 1, runs);
    }
  }

  // Keys [first_key, end_key) of the first 256 runs: a warp writes one run after the other. True if
  // there are none behind.
  __device__ bool put_runs(int64_t begin, uint32_t first_key, uint32_t end_key, const Runs& runs) {
    uint32_t inside = __ballot_sync(~0u, runs.end[0] > first_key && runs.begin[0] < end_key);
#pragma unroll 1
    for (; inside != 0; inside &= inside - 1) {
      const int i = __ffs(inside) - 1;
      const uint32_t run_begin = __shfl_sync(~0u, runs.begin[0], i);
      const uint32_t run_end = min(__shfl_sync(~0u, runs.end[0], i), end_key);
      const uint32_t to_slot = __shfl_sync(~0u, runs.first[0], i) - run_begin;
#pragma unroll 1
      for (uint32_t key = max(run_begin, first_key) + lane_; key < run_end; key += 32) {
        put(begin, exact() + key, to_slot + key);
      }
    }
    return __any_sync(~0u, runs.begin[0] >= end_key);
  }

  __device__ void put(int64_t begin, int64_t key, uint32_t where) {
    if constexpr (kCoded) {
      s_.in.coded[key - begin].slot = where;
      return;
    }
    s_.in.list[key - begin] = where;
  }

  __device__ uint32_t exact_key(int64_t key) const {
    return kExactKey | static_cast<uint32_t>(key + layer().exact_skipped);
  }
  // Bytes from the start of keys or values; of exact keys from the start of theirs.
  __device__ __forceinline__ const char* row_at(uint32_t where, const void* slots,
                                                const void* exact) const {
    const bool is_exact = (where & kExactKey) != 0;
    const char* base = static_cast<const char*>(is_exact ? exact : slots);
    const int64_t row = head_ * (is_exact ? layer().exact : layer().slots) + (where & ~kExactKey);
    return base + row * kRowBytes;
  }

  // Row of a key, of `begin` + index; beyond the last key the last one's.
  __device__ __forceinline__ uint32_t where(int64_t begin, int64_t index, int64_t count,
                                            bool list) const {
    index = min(index, count - 1);
    if (list) return s_.in.list[index];
    const int64_t key = begin + index;
    return key < exact() ? exact_key(key) : static_cast<uint32_t>(key - exact());
  }

  // Clusters and scales of the first `count` of s_.in.coded, all under way at once; and the last
  // key again, to the end of its tile.
  __device__ void complete(int64_t count) {
    const auto keys = static_cast<int>(count);
#pragma unroll 8
    for (int k = thread_; k < keys; k += kAttendThreads) {
      const uint32_t slot = s_.in.coded[k].slot;
      const int64_t row = head_ * layer().slots + slot;
      const uint32_t cluster = __ldg(layer().coded.clusters + row);
      means_ += cluster / kFirstSlot;
      const auto scale = [&](const CodedRows& rows) {
        return Element::low(__ldg(static_cast<const uint16_t*>(rows.scales) + row));
      };
      s_.in.coded[k] = {slot, cluster & ~kFirstSlot, scale(layer().coded.keys),
                        scale(layer().coded.values)};
    }
    __syncthreads();
    if (const int k = keys + thread_; k < this->round_up(keys))
      s_.in.coded[k] = s_.in.coded[keys - 1];
    __syncthreads();
  }
  // A lookup has read the mean keys, not the mean values.
  __device__ void count_means() {
    const uint32_t means = __reduce_add_sync(~0u, means_) * (listed_ && !whole_ ? 1 : 2);
    if (lane_ == 0 && means > 0 && layer().counters != nullptr) {
      atomicAdd(layer().counters + 2, static_cast<unsigned long long>(means));
    }
    means_ = 0;
  }

  // ---- The keys of a warp.

  struct Values {
    uint4 words[4][kHalves];  // of 4 keys
  };

  __device__ __forceinline__ void load_keys(int64_t begin, int64_t tile, int64_t count, bool list,
                                            RowPart<kDim> (&keys)[2]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t at = where(begin, tile + 8 * t + lane_ / 4, count, list);
      keys[t].load(row_at(at, layer().keys, layer().exact_keys), lane_);
    }
  }

  // Lane 4 n + t: dimensions [64 h + 8 n, + 8) of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  __device__ __forceinline__ void load_values(int64_t begin, int64_t tile, int64_t count, bool list,
                                              Values& values) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = tile + 2 * (lane_ % 4) + i % 2 + i / 2 * 8;
      const char* row =
          row_at(where(begin, key, count, list), layer().values, layer().exact_values);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int byte = 128 * h + 16 * (lane_ / 4);
        const bool inside = kDim % 64 == 0 || byte < kRowBytes;
        values.words[i][h] = inside ? load_stream(row + byte) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ void attend_keys(int64_t begin, int64_t end, bool list, State& state) {
    const int64_t count = end - begin;
    constexpr int64_t kStep = kAttendWarps * kTileKeys;
    int64_t tile = warp_ * kTileKeys;
    if (tile >= count) return;
    RowPart<kDim> keys[2];
    load_keys(begin, tile, count, list, keys);
#pragma unroll 1
    for (; tile < count; tile += kStep) {
      Values values;
      load_values(begin, tile, count, list, values);
      float logits[2][4] = {};
      multiply_rows<Element>(s_.in.queries, keys, lane_, logits);
      // Under way while this tile's softmax and values are worked on.
      if (tile + kStep < count) load_keys(begin, tile + kStep, count, list, keys);
      Weights weights;
      softmax(logits, count - tile, weights, state);
      add_values(weights, values, state);
    }
  }

  // ---- The same of rows of codes: products with means, and with codes times their scales.

  // Lane 4 n + t: as load_values().
  struct CodedValues {
    uint2 words[4][kHalves];
  };

  // What a warp has of a tile. Each part is loaded for the next tile once this one's is used.
  struct CodedTile {
    RowPart8<kDim> keys[2];
    RowPart<kDim> mean_keys[2];
    Values mean_values;
    CodedValues values;
  };

  // What lanes have of a tile's rows: of keys a quarter of row lane / 4, and of row lane / 4 + 8;
  // of values 8 dimensions of the rows that load_values() names.
  struct CodedBases {
    const char *keys, *mean_keys, *values, *mean_values;
  };
  __device__ CodedBases coded_bases() const {
    const auto at = [&](const void* rows, int64_t row, int bytes) {
      return static_cast<const char*>(rows) + row * bytes;
    };
    const int64_t slot = head_ * layer().slots, cluster = int64_t{head_} * layer().coded.count;
    return {at(layer().coded.keys.codes, slot, kDim),
            at(layer().coded.mean_keys, cluster, kRowBytes),
            at(layer().coded.values.codes, slot, kDim) + 8 * (lane_ / 4),
            at(layer().coded.mean_values, cluster, kRowBytes) + 16 * (lane_ / 4)};
  }
  __device__ __forceinline__ const CodedKey& coded_key(int tile, int i) const {
    return s_.in.coded[tile + 2 * (lane_ % 4) + i % 2 + i / 2 * 8];
  }

  __device__ __forceinline__ void load_coded_keys(const CodedBases& from, int tile,
                                                  CodedTile& to) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      to.keys[t].load(from.keys + uint64_t{s_.in.coded[tile + 8 * t + lane_ / 4].slot} * kDim,
                      lane_);
    }
  }
  __device__ __forceinline__ void load_mean_keys(const CodedBases& from, int tile,
                                                 CodedTile& to) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t cluster = s_.in.coded[tile + 8 * t + lane_ / 4].cluster;
      to.mean_keys[t].load_kept(from.mean_keys + uint64_t{cluster} * kRowBytes, lane_);
    }
  }
  __device__ __forceinline__ void load_mean_values(const CodedBases& from, int tile,
                                                   CodedTile& to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* row = from.mean_values + uint64_t{coded_key(tile, i).cluster} * kRowBytes;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        to.mean_values.words[i][h] =
            has_dims(h) ? load_kept(row + 128 * h) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ void load_coded_values(const CodedBases& from, int tile,
                                                    CodedTile& to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* row = from.values + uint64_t{coded_key(tile, i).slot} * kDim;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        to.values.words[i][h] = has_dims(h) ? load_stream_8(row + 64 * h) : make_uint2(0, 0);
      }
    }
  }
  // Whether half h of a row has dimensions of this lane.
  __device__ __forceinline__ bool has_dims(int h) const {
    return kDim % 64 == 0 || 64 * h + 8 * (lane_ / 4) < kDim;
  }

  __device__ __forceinline__ void multiply_coded(int tile, const CodedTile& loaded,
                                                 float (&logits)[2][4]) const {
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) logits[i / 4][i % 4] = 0;
    multiply_rows_8(s_.in.queries_8, loaded.keys, lane_, sums);
    multiply_rows<Element>(s_.in.queries, loaded.mean_keys, lane_, logits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = coded_key(tile, i).key_scale;
      logits[i / 2][i % 2] += scale * sums[i / 2][i % 2];
      logits[i / 2][i % 2 + 2] += scale * sums[i / 2][i % 2 + 2];
    }
  }

  // While a tile's values are added up, the logits of the next are on their way; of the last tile
  // once more, so that there is no branch between the two.
  __device__ void attend_codes(int count, State& state) {
    constexpr int kStep = kAttendWarps * kTileKeys;
    int tile = warp_ * kTileKeys;
    if (tile >= count) return;
    const int last = tile + (count - 1 - tile) / kStep * kStep;
    const CodedBases from = coded_bases();
    CodedTile loaded;
    load_coded_keys(from, tile, loaded);
    load_mean_keys(from, tile, loaded);
    load_mean_values(from, tile, loaded);
    load_coded_values(from, tile, loaded);
    float logits[2][4];
    multiply_coded(tile, loaded, logits);
    load_coded_keys(from, min(tile + kStep, last), loaded);
    load_mean_keys(from, min(tile + kStep, last), loaded);
#pragma unroll 1
    for (; tile <= last; tile += kStep) {
      const int next = min(tile + kStep, last), later = min(tile + 2 * kStep, last);
      Weights weights, coded_weights;
      softmax(logits, count - tile, weights, state);
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        coded_weights[i / 4][i % 4] = weights[i / 4][i % 4] * coded_key(tile, i % 4).value_scale;
      }
      multiply_coded(next, loaded, logits);
      add_values(weights, loaded.mean_values, state);
      add_codes(coded_weights, loaded.values, state);
      load_coded_keys(from, later, loaded);
      load_mean_keys(from, later, loaded);
      load_mean_values(from, next, loaded);
      load_coded_values(from, next, loaded);
    }
  }

  __device__ __forceinline__ void add_codes(const Weights& weights, const CodedValues& values,
                                            State& state) {
    uint32_t a[kParts][4];
    split_weights<Bf16>(weights, a);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // Pairs of keys of two dimensions, from four dimensions of one key.
        const auto word = [&](int key) { return (&values.words[key][h].x)[w / 2]; };
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

  // ---- Weights and values.

  // x: weights of this lane's keys of the tile, 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of lane 4 n + t.
  __device__ __forceinline__ void softmax(const float (&logits)[2][4], int64_t left, Weights& x,
                                          State& state) {
    float top[kParts];
    bool moves = false;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
        x[p][i] = key < left ? sound(product_of<kRows>(logits[i / 2], p, i % 2)) : -INFINITY;
      }
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
        for (int j = 0; j < 4; ++j) state.out[i][j] *= factor[Merge::part_of(j)];
      }
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

  const void* queries_;
  int head_ = 0;
  int64_t own_exact_ = 0;  // of the segment's request
  bool whole_ = false;     // nothing was looked up for it
  uint32_t means_ = 0;     // of this thread's keys, that are a cluster's first
};

}  // namespace sqz::cuda
