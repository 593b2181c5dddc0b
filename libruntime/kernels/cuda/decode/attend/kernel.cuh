// Blocks share the keys of all pairs evenly. The part of one pair that a block has is a segment;
// its 8 warps take tiles of 16 keys in turn, or, of rows of 8 bits, have a range of keys each. Keys
// and values go from memory straight to registers.
#pragma once

#include <type_traits>

#include "libruntime/kernels/cuda/common/run_search.cuh"
#include "libruntime/kernels/cuda/decode/attend/coded_rows.cuh"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/context_layer.cuh"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows, bool kCoded, bool kOwn>
using AttendRows = std::conditional_t<kCoded, AttendCodes<Element, kDim, kRows, kOwn>,
                                      AttendTile<Element, kDim, kRows, false, kOwn>>;

// kRows: query rows that a pair has at most. kCoded: keys and values are rows of 8 bits. kOwn: the
// requests have layers of their own.
template <class Element, int kDim, int kRows, bool kCoded, bool kOwn>
class Attend : private AttendRows<Element, kDim, kRows, kCoded, kOwn> {
  using Base = AttendRows<Element, kDim, kRows, kCoded, kOwn>;

 public:
  __device__ Attend(const AttendParams& params, AttendShared<kDim, kRows>& shared)
      : Base(params, shared) {}

  __device__ void run() {
    ptx::griddepcontrol_launch_dependents();
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
      if (kOwn) this->write_others();
    }
#pragma unroll 1
    while (more) {
      if (!by_pairs) at = this->segment_of(pair, at, end, segment);
      attend_segment(segment);
      more = !by_pairs && at < end;
    }
  }

 private:
  using Base::kHalves, Base::kParts, Base::kRowBytes;
  static constexpr bool kAhead = Base::kAhead && !kCoded;  // few keys are exact beside codes
  using Base::lane_, Base::listed_, Base::p_, Base::pairs_, Base::s_, Base::thread_, Base::warp_;
  using Base::layer;
  using typename Base::Segment, typename Base::State, typename Base::Values;
  using typename Base::Weights;

  // Runs of a segment's pair. Lane i of warp w has runs 8 i + w of 256, and of the 256 after these.
  struct Runs {
    uint32_t at;
    uint32_t first[2], begin[2], end[2];  // begin: ~0 beyond the last
  };

  __device__ void attend_segment(const Segment& segment) {
    head_ = segment.pair % p_.kv_heads;
    if constexpr (kOwn) {
      const ContextLayer& own = p_.own[segment.pair / p_.kv_heads];
      copy_layer(own.keys, s_.layer);
      own_exact_ = segment.totals.exact;
      whole_ = kCoded && own.lookup.levels == 0;
    }
    Runs runs;
    if (listed_) runs = runs_from(segment, segment.begin);  // on their way beside the queries
    load_queries(segment.pair);
    if (kOwn) __syncthreads();
    State state = {};
#pragma unroll
    for (float& maximum : state.maximum) maximum = kLowestMaximum;
    if constexpr (kCoded) {
      attend_coded(segment, runs, state);
      this->count_means(listed_ && !whole_);
    } else {
      attend_lists(segment, segment.begin, segment.end, runs, state);
    }
    this->finish_segment(segment, state);
  }

  // Keys [begin, end) of a segment, a list after the other.
  __device__ void attend_lists(const Segment& segment, int64_t begin, int64_t end, Runs& runs,
                               State& state) {
    int count;
    for (int64_t at = begin; at < end; at += count) {
      count = static_cast<int>(min(end - at, int64_t{kListKeys}));
      if (at > begin) {
        __syncthreads();
        if (listed_) runs = runs_from(segment, at);
      }
      locate(segment, at, at + count, runs);
      __syncthreads();
      attend_keys(count, state);
    }
  }

  // Rows of 8 bits behind the exact keys: while the keys of a list are attended to, clusters and
  // scales of the next are on their way.
  __device__ void attend_coded(const Segment& segment, Runs& runs, State& state) {
    int64_t at = segment.begin;
    if (at < exact()) {
      at = min(segment.end, exact());
      attend_lists(segment, segment.begin, at, runs, state);
    }
    __syncthreads();
    int count = 0, coming;
    do {
      coming = static_cast<int>(min(segment.end - at, int64_t{coded_keys(kRows)}));
      if (coming > 0) locate(segment, at, at + coming, runs);
      __syncthreads();
      this->fetch_list(head_, coming);
      this->attend_codes(head_, count, state);
      this->complete_list(head_, coming);
      __syncthreads();
      count = coming;
      at += coming;
    } while (coming > 0);
  }

  __device__ int64_t exact() const {
    return kOwn ? own_exact_ : Base::exact_;
  }

  __device__ void load_queries(int pair) {
    const int64_t first = static_cast<int64_t>(pair) * p_.group;
    make_query_rows<Element>(s_.in.queries, p_.group, thread_, kAttendThreads,
                             [&](int row, int chunk, float(&x)[8]) {
                               load_8(p_.q_dtype, p_.q, (first + row) * kDim + chunk * 8, x);
#pragma unroll
                               for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                             });
    if constexpr (kCoded) {
      make_query_codes(s_.in.query_codes, p_.group, warp_, kAttendWarps, lane_,
                       [&](int row, int dim, float(&x)[4]) {
#pragma unroll
                         for (int i = 0; i < 4; ++i) {
                           x[i] =
                               p_.scale * load_1(p_.q_dtype, p_.q, (first + row) * kDim + dim + i);
                         }
                       });
    }
  }

  // ---- Where keys are.

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
      s_.in.list[k - begin] = exact_key(k);
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
  // there are none behind; the next key is of these runs, too, then, or of the next 256.
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
    return __any_sync(~0u, max(runs.begin[0], runs.end[0]) >= end_key);
  }

  __device__ void put(int64_t begin, int64_t key, uint32_t slot) {
    if constexpr (kCoded) {
      this->next_list()[key - begin].slot = slot;
    } else {
      s_.in.list[key - begin] = slot;
    }
  }

  __device__ uint32_t exact_key(int64_t key) const {
    return kExactKey | static_cast<uint32_t>(key + layer().exact_skipped);
  }

  // ---- The keys of a warp.

  // The head's rows of slots, and its exact ones.
  struct HeadRows {
    const char *slots, *exact;
  };
  __device__ HeadRows head_rows(const void* slots, const void* exact) const {
    return {static_cast<const char*>(slots) + head_ * layer().slots * kRowBytes,
            static_cast<const char*>(exact) + head_ * layer().exact * kRowBytes};
  }
  // Row of key `index` of `count` in the list; beyond the last key the last one's.
  __device__ __forceinline__ const char* row_at(const HeadRows& rows, int index, int count) const {
    const uint32_t where = s_.in.list[min(index, count - 1)];
    return ((where & kExactKey) != 0 ? rows.exact : rows.slots) +
           uint64_t{where & ~kExactKey} * kRowBytes;
  }

  __device__ __forceinline__ void load_keys(const HeadRows& rows, int tile, int count,
                                            RowPart<kDim> (&keys)[2]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      keys[t].load(row_at(rows, tile + 8 * t + lane_ / 4, count), lane_);
    }
  }
  __device__ __forceinline__ void load_values(const HeadRows& rows, int tile, int count,
                                              Values& values) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* row = row_at(rows, this->key_of(tile, i), count);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const char* dims = row + 2 * this->first_dim(h, lane_ / 4);
        values.words[i][h] = this->has_dims(h) ? load_stream(dims) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Keys of the list. The next tile's keys and values are on their way while this one's are worked
  // on. They are asked for at one place: the compiler has one scoreboard for both, so that a wait
  // is for all of them.
  __device__ void attend_keys(int keys_in_list, State& state) {
    constexpr int kStep = kAttendWarps * kTileKeys;
    const int count = ptx::uniform(keys_in_list);
    int tile = ptx::uniform(warp_ * kTileKeys);
    if (tile >= count) return;
    const HeadRows keys_of = head_rows(layer().keys, layer().exact_keys);
    const HeadRows values_of = head_rows(layer().values, layer().exact_values);
    RowPart<kDim> keys[2];
    Values next;
    load_keys(keys_of, tile, count, keys);
    if (kAhead) load_values(values_of, tile, count, next);
#pragma unroll 1
    for (; tile < count; tile += kStep) {
      Values values;
      if (!kAhead) load_values(values_of, tile, count, values);
      float logits[2][4] = {};
      multiply_rows<Element>(s_.in.queries, keys, lane_, logits);
      if (kAhead) values = next;
      if (tile + kStep < count) {
        load_keys(keys_of, tile + kStep, count, keys);
        if (kAhead) load_values(values_of, tile + kStep, count, next);
      }
      Weights weights;
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        weights[i / 4][i % 4] = product_of<kRows>(logits[i % 4 / 2], i / 4, i % 2);
      }
      this->softmax(weights, count - tile, state, [](const float(&)[kParts]) {});
      this->add_values(weights, values, state);
    }
  }

  int head_ = 0;
  int64_t own_exact_ = 0;  // of the segment's request
  bool whole_ = false;     // nothing was looked up for it
};

}  // namespace sqz::cuda
