// Lookup for several requests at once, by the rule `threshold`: a team of blocks serves a KV head
// of up to 32 requests and reads every centroid once for all of them. A block keeps its slice of
// each level: the logits of all query rows, and for each cluster a word with a bit for every
// request in which it is alive, or chosen.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/parts.cuh"
#include "libruntime/kernels/cuda/decode_lookup/team.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"

namespace sqz::cuda {

inline constexpr int kTogetherThreads = 512;
inline constexpr int kTogetherWarps = kTogetherThreads / 32;
inline constexpr int kTogetherRows = 64;  // query rows of a team, at most
inline constexpr int kTogetherSets = kTogetherRows / 8;

// At the beginning of a block's dynamic shared memory; the arrays of its slice follow.
template <int kDim>
struct TogetherShared {
  QueryRows<kDim> queries[kTogetherSets];
  TeamShared<kTogetherThreads> team;
  float lse[kTogetherRows];
  uint32_t faults;  // a bit a request
};

// Floats between the rows of logits of a slice: rows of a product fall on different banks.
__host__ __device__ constexpr int64_t together_stride(int64_t slice) {
  return (slice + 31) / 32 * 32 + 8;
}

// Shared memory of a block for slices of `slice` clusters.
template <int kDim>
constexpr int64_t together_bytes(int64_t slice, int64_t rows) {
  return static_cast<int64_t>(sizeof(TogetherShared<kDim>)) +
         4 * (4 * (slice + 1) + rows * together_stride(slice));
}

template <class Element, int kDim>
class LookupTogether : private LookupTeam<kTogetherThreads> {
 public:
  // `together` requests of a team; `slice`: clusters of a block, at most.
  __device__ LookupTogether(const LookupParams& params, int team, int together, int slice,
                            char* memory)
      : LookupTeam<kTogetherThreads>(team, reinterpret_cast<TogetherShared<kDim>*>(memory)->team,
                                     params.exchange),
        p_(params),
        s_(*reinterpret_cast<TogetherShared<kDim>*>(memory)),
        head_(static_cast<int>(blockIdx.x) / team % params.kv_heads),
        first_(static_cast<int>(blockIdx.x) / team / params.kv_heads * together),
        requests_(min(together, params.requests - first_)),
        rows_(requests_ * params.group),
        stride_(together_stride(slice)) {
    alive_ = reinterpret_cast<uint32_t*>(memory + sizeof(TogetherShared<kDim>));
    chosen_ = alive_ + slice + 1;
    offsets_ = chosen_ + slice + 1;
    log_sizes_ = reinterpret_cast<float*>(offsets_ + slice + 1);
    logits_ = log_sizes_ + slice + 1;
  }

  __device__ void run() {
    ask_ahead();
    ptx::griddepcontrol_wait();
    // Not before the queries are there: attention counts on it.
    ptx::griddepcontrol_launch_dependents();
    load_queries();
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const LookupLevel& level = p_.level[k];
      const auto count = static_cast<uint64_t>(level.clusters);
      begin_ = static_cast<uint32_t>(count * rank_ / team_);
      size_ = static_cast<uint32_t>(count * (rank_ + 1) / team_) - begin_;
      const char* centroids = static_cast<const char*>(level.centroids) +
                              (static_cast<int64_t>(head_) * level.clusters + begin_) * kDim * 2;
      RowPart<kDim> first[2];  // on their way while the slice's numbers come
      if (kAhead && own_tile() < size_) load_step(centroids, own_tile(), first);
      load_slice(level, k == 0 ? nullptr : alive_words(k - 1));
      score(centroids, first);
      add_up();
      choose(level);
      if (k + 1 == p_.levels) break;
      mark_children(alive_words(k));
      sync_team();
    }
    if (p_.unions.runs == nullptr) {
      emit();
    } else {
      emit_union();
    }
    const uint32_t centroids = block_sums({centroids_, 0}).a;
    if (thread_ == 0) atomicAdd(&p_.counters[2], static_cast<unsigned long long>(centroids));
    leave_team();
  }

 private:
  // The centroids of the first level start their way from memory: no earlier kernel writes them.
  __device__ void ask_ahead() const {
    const int64_t bytes = int64_t{p_.level[0].clusters} * kDim * 2;
    const auto* from = static_cast<const char*>(p_.level[0].centroids) + head_ * bytes;
#pragma unroll 1
    for (int64_t at = (rank_ * kTogetherThreads + thread_) * int64_t{128}; at < bytes;
         at += team_ * kTogetherThreads * int64_t{128}) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
  }

  __device__ uint32_t* alive_words(int level) const {
    const int64_t pair = static_cast<int64_t>(first_) * p_.kv_heads + head_;
    return p_.alive + (pair * 2 + level % 2) * p_.width;
  }
  __device__ uint32_t all_requests() const {
    return requests_ == 32 ? ~0u : (1u << requests_) - 1;
  }
  __device__ float& logit(int row, uint32_t j) const {
    return logits_[row * stride_ + j];
  }

  // Row r is query head r % group of request r / group.
  __device__ void load_queries() {
#pragma unroll 1
    for (int set = 0; 8 * set < rows_; ++set) {
      make_query_rows<Element, kDim>(
          s_.queries[set], rows_ - 8 * set, thread_, kTogetherThreads,
          [&](int row, int chunk, float(&x)[8]) {
            const int at = 8 * set + row;
            const int64_t request = first_ + at / p_.group;
            const int64_t query = (request * p_.kv_heads + head_) * p_.group + at % p_.group;
            load_8(p_.q_dtype, p_.q, query * kDim + chunk * 8, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
          });
    }
    if (thread_ == 0) s_.faults = 0;
  }

  __device__ void load_slice(const LookupLevel& level, const uint32_t* alive) {
    const int64_t clusters = level.clusters;
    uint32_t centroids = 0;
    __syncthreads();  // the level before has been read
#pragma unroll 1
    for (uint32_t j = thread_; j <= size_; j += kTogetherThreads) {
      offsets_[j] = __ldg(level.offsets + head_ * (clusters + 1) + begin_ + j);
      if (j == size_) break;
      // An empty cluster is alive for none.
      const float log_size = __ldg(level.log_sizes + head_ * clusters + begin_ + j);
      log_sizes_[j] = log_size * 1.4426950408889634f;
      const uint32_t read = alive == nullptr ? all_requests() : __ldcg(alive + begin_ + j);
      alive_[j] = log_size == -INFINITY ? 0 : read;
      chosen_[j] = 0;
      centroids += __popc(read);
    }
    centroids_ += centroids;
    __syncthreads();
  }

  static constexpr uint32_t kStep = 16;        // clusters of a warp at a time
  static constexpr bool kAhead = kDim <= 128;  // two steps under way: there are registers
  __device__ uint32_t own_tile() const {
    return warp_ * kStep;
  }

  __device__ __forceinline__ void load_step(const char* centroids, uint32_t tile,
                                            RowPart<kDim> (&rows)[2]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t row = min(tile + 8 * t + lane_ / 4, size_ - 1);
      rows[t].load(centroids + static_cast<int64_t>(row) * kDim * 2, lane_);
    }
  }

  // Logits of the slice.
  __device__ void score(const char* centroids, RowPart<kDim> (&now)[2]) {
    constexpr uint32_t kStride = kTogetherWarps * kStep;
    RowPart<kDim> next[2];
    uint32_t tile = own_tile();
#pragma unroll 1
    for (; tile < size_; tile += kStride) {
      load_step(centroids, kAhead ? min(tile + kStride, size_ - 1) : tile, kAhead ? next : now);
#pragma unroll 1
      for (int set = 0; 8 * set < rows_; ++set) {
        float d[2][4] = {};
        multiply_rows<Element, kDim, 2>(s_.queries[set], now, lane_, d);
        const int row = 8 * set + lane_ / 4;
        if (row >= rows_) continue;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          // Up to 15 past the slice: there is room in a row.
          *reinterpret_cast<float2*>(&logit(row, tile + 8 * t + 2 * (lane_ % 4))) =
              make_float2(d[t][0] + d[t][2], d[t][1] + d[t][3]);
        }
      }
#pragma unroll
      for (int t = 0; kAhead && t < 2; ++t) now[t] = next[t];
    }
    __syncthreads();
  }

  // s_.lse of every row over the team; a bit in s_.faults where it is NaN or infinite.
  __device__ void add_up() {
#pragma unroll 1
    for (int row = warp_; row < rows_; row += kTogetherWarps) {
      const int request = row / p_.group;
      float maximum = kLowestLogit;
#pragma unroll 4
      for (uint32_t j = lane_; j < size_; j += 32) {
        const bool counts = (alive_[j] >> request & 1) != 0;
        maximum = counts ? fmaxf(maximum, logit(row, j) + log_sizes_[j]) : maximum;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
      }
      float sum = 0;
#pragma unroll 4
      for (uint32_t j = lane_; j < size_; j += 32) {
        const bool counts = (alive_[j] >> request & 1) != 0;
        const float y = logit(row, j) + log_sizes_[j];  // NaN and infinity show in the sum
        sum += counts ? ptx::ex2_approx(y - maximum) : 0;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane_ == 0) {
        own_words()[2 * row] = __float_as_uint(maximum);
        own_words()[2 * row + 1] = __float_as_uint(sum);
      }
    }
    sync_team();
#pragma unroll 1
    for (int row = warp_; row < rows_; row += kTogetherWarps) {
      float maximum = kLowestLogit, sum = 0;
      if (lane_ < team_) {
        maximum = __uint_as_float(told(lane_, 2 * row));
        sum = __uint_as_float(told(lane_, 2 * row + 1));
      }
      // A butterfly, so that all blocks add in the same order.
#pragma unroll
      for (int step = 1; step < kMostTeam; step *= 2) {
        const float m = __shfl_xor_sync(~0u, maximum, step), l = __shfl_xor_sync(~0u, sum, step);
        add_sums(maximum, sum, m, l);
      }
      if (lane_ != 0) continue;
      // Nothing alive: no logit will be compared with it.
      const float lse = sum == 0 ? 0 : maximum + log2f(sum);
      s_.lse[row] = lse;
      if (!(fabsf(lse) <= FLT_MAX)) atomicOr(&s_.faults, 1u << (row / p_.group));
    }
    next_turn();
    __syncthreads();
  }

  // A thread takes every fourth request of a cluster.
  __device__ void choose(const LookupLevel& level) {
    constexpr int kParts = 4;
    const float log_group = log2f(static_cast<float>(p_.group));
    const uint32_t sound = ~s_.faults;
#pragma unroll 1
    for (uint32_t j = warp_ / kParts * 32 + lane_; j < size_; j += kTogetherWarps / kParts * 32) {
      const uint32_t alive = alive_[j] & sound;
      uint32_t bits = 0;
#pragma unroll 1
      for (int request = warp_ % kParts; request < requests_; request += kParts) {
        if ((alive >> request & 1) == 0) continue;
        const float score = combined(request * p_.group, j, level.threshold, log_group);
        if (score >= level.threshold && score > -INFINITY) bits |= 1u << request;
      }
      if (bits != 0) atomicOr(&chosen_[j], bits);
    }
    __syncthreads();
  }

  // log2 of the combined S of a request's cluster, or something else below the threshold.
  __device__ float combined(int first_row, uint32_t j, float threshold, float log_group) const {
    float y[kMostGroup];
    float top = -INFINITY;
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      y[g] = g < p_.group ? logit(first_row + g, j) - s_.lse[first_row + g] : -INFINITY;
      top = fmaxf(top, y[g]);
    }
    // A mean is at most the maximum.
    if (!p_.mean || top < threshold) return top;
    float sum = 0;
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) sum += ptx::ex2_approx(y[g] - top);
    return top + log2f(sum) - log_group;
  }

  // Children are alive where their parents were chosen.
  __device__ void mark_children(uint32_t* alive) const {
#pragma unroll 1
    for (uint32_t j = thread_; j < size_; j += kTogetherThreads) {
#pragma unroll 1
      for (uint32_t child = offsets_[j]; child < offsets_[j + 1]; ++child) {
        alive[child] = chosen_[j];
      }
    }
  }

  // A warp's requests: their chosen clusters as runs, that end at the latest with 32 clusters.
  __device__ void emit() {
#pragma unroll 1
    for (int request = warp_; request < requests_; request += kTogetherWarps) {
      Sums own;
#pragma unroll 1
      for (uint32_t tile = 0; tile < size_; tile += 32) {
        const Part part = part_at(tile + lane_, request);
        own.a += __popc(part.begins);
        own.b += part.length;
      }
      own.b = __reduce_add_sync(~0u, own.b);
      if (lane_ == 0) {
        own_words()[2 * request] = own.a;
        own_words()[2 * request + 1] = own.b;
      }
    }
    sync_team();
#pragma unroll 1
    for (int request = warp_; request < requests_; request += kTogetherWarps) {
      const uint32_t runs = lane_ < team_ ? told(lane_, 2 * request) : 0;
      const uint32_t keys = lane_ < team_ ? told(lane_, 2 * request + 1) : 0;
      const Sums before = {__reduce_add_sync(~0u, lane_ < rank_ ? runs : 0),
                           __reduce_add_sync(~0u, lane_ < rank_ ? keys : 0)};
      const Sums all = {__reduce_add_sync(~0u, runs), __reduce_add_sync(~0u, keys)};
      write_runs(request, before);
      if (rank_ == 0 && lane_ == 0) finish(request, all);
    }
  }

  struct Part {
    uint32_t length = 0;   // of the lane's cluster; 0: not chosen
    uint32_t begins = 0;   // bits of the lanes whose clusters begin a run
    uint32_t members = 0;  // clusters of the run that the lane's begins
  };
  __device__ Part part_at(uint32_t j, int request) const {
    const bool is = j < size_ && (chosen_[j] >> request & 1) != 0;
    const uint32_t bits = __ballot_sync(~0u, is);
    return {is ? offsets_[j + 1] - offsets_[j] : 0, bits & ~(bits << 1), 0};
  }

  __device__ int64_t pair_of(int request) const {
    return static_cast<int64_t>(first_ + request) * p_.kv_heads + head_;
  }

  __device__ void write_runs(int request, Sums at) const {
    const RunLists& lists = p_.lists;
    uint32_t* run_first = lists.first + pair_of(request) * (lists.capacity + 1);
    uint32_t* run_before = lists.before + pair_of(request) * (lists.capacity + 1);
    uint32_t* marks = lists.marks + pair_of(request) * lists.mark_capacity;
#pragma unroll 1
    for (uint32_t tile = 0; tile < size_; tile += 32) {
      const Part part = part_at(tile + lane_, request);
      if (part.begins == 0) continue;
      uint32_t scan = part.length;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t up = __shfl_up_sync(~0u, scan, step);
        if (lane_ >= step) scan += up;
      }
      const uint32_t end = at.b + scan, begin = end - part.length;
      const uint32_t run = at.a + __popc(part.begins & (2u << lane_) - 1) - 1;
      if ((part.begins >> lane_ & 1) != 0) {
        run_first[run] = offsets_[tile + lane_];
        run_before[run] = begin;
      }
#pragma unroll 1
      for (uint32_t m = (begin + kMarkKeys - 1) / kMarkKeys; m * kMarkKeys < end; ++m) {
        marks[m] = run;
      }
      at.a += __popc(part.begins);
      at.b = __shfl_sync(~0u, end, 31);
    }
  }

  __device__ void finish(int request, Sums all) const {
    if ((s_.faults >> request & 1) != 0) {
      end_with_fault(p_, pair_of(request));
    } else {
      end_lists(p_, pair_of(request), head_, all, 0);
    }
  }

  // ---- What any request chose.

  __device__ void emit_union() {
    Sums own, tile_sums, all;
    uint32_t keys = 0;  // of all requests
#pragma unroll 1
    for (uint32_t tile = 0; tile < size_; tile += kTogetherThreads) {
      const Part part = union_part_at(tile + thread_);
      own.a += part.begins >> lane_ & 1;
      own.b += part.length;
      if (part.length > 0) keys += part.length * __popc(chosen_[tile + thread_]);
    }
    Sums before = team_sums(block_sums(own), all);
#pragma unroll 1
    for (uint32_t tile = 0; tile < size_; tile += kTogetherThreads) {
      const Part part = union_part_at(tile + thread_);
      const Sums at = sums_before({part.begins >> lane_ & 1, part.length}, tile_sums);
      write_union(tile + thread_, part, {before.a + at.a, before.b + at.b});
      before.a += tile_sums.a;
      before.b += tile_sums.b;
    }
    keys = block_sums({keys, 0}).a;
    if (thread_ == 0) atomicAdd(&p_.counters[1], static_cast<unsigned long long>(keys));
    if (rank_ == 0) finish_union(all);
  }

  // As part_at(), with `members`.
  __device__ Part union_part_at(uint32_t j) const {
    const bool is = j < size_ && chosen_[j] != 0;
    const uint32_t bits = __ballot_sync(~0u, is);
    const uint32_t others = ~(bits >> lane_);
    return {is ? offsets_[j + 1] - offsets_[j] : 0, bits & ~(bits << 1),
            others == 0 ? 32u : static_cast<uint32_t>(__ffs(others)) - 1};
  }

  __device__ int64_t list() const {
    return static_cast<int64_t>(blockIdx.x) / team_;
  }

  __device__ void write_union(uint32_t j, const Part& part, Sums at) const {
    const UnionLists& to = p_.unions;
    if ((part.begins >> lane_ & 1) != 0) {
      const int64_t run = list() * to.capacity + at.a;
      to.runs[run] = make_uint2(offsets_[j], offsets_[j + part.members] - offsets_[j]);
      to.prefix[run] = at.b;
    }
    uint32_t* masks = to.masks + list() * to.mask_stride + to.exact;
    const uint32_t own = part.length > 0 ? chosen_[j] : 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const uint32_t length = __shfl_sync(~0u, part.length, i);
      const uint32_t first = __shfl_sync(~0u, at.b, i), mask = __shfl_sync(~0u, own, i);
      for (uint32_t key = lane_; key < length; key += 32) masks[first + key] = mask;
    }
  }

  __device__ void finish_union(Sums all) const {
    const UnionLists& to = p_.unions;
    for (int64_t key = thread_; key < to.exact; key += kTogetherThreads) {
      to.masks[list() * to.mask_stride + key] = all_requests();
    }
    if (thread_ != 0) return;
    to.counts[list()] = all.a;
    to.totals[list()] = all.b;
    to.faults[list()] = s_.faults;
    const int sound = requests_ - __popc(s_.faults & all_requests());
    if (head_ == 0) atomicAdd(&p_.counters[0], static_cast<unsigned long long>(sound));
  }

  const LookupParams& p_;
  TogetherShared<kDim>& s_;
  const int head_, first_, requests_, rows_;
  const int64_t stride_;  // of logits_
  // Of the slice.
  uint32_t *alive_, *chosen_, *offsets_;
  float *log_sizes_, *logits_;
  uint32_t begin_ = 0, size_ = 0;
  uint32_t centroids_ = 0;  // that this thread counted
};

}  // namespace sqz::cuda
