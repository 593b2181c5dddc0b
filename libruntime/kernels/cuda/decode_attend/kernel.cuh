// Blocks share the keys of all pairs evenly: laid end to end, block b has keys [b W, (b + 1) W).
// The part of one pair that a block has is a segment; its 8 warps take tiles of 16 keys in turn,
// keys and values going from memory straight to registers. A pair cut into several segments is
// merged by the block that finishes last, in the order of the keys: the same bits whatever the
// timing.
#pragma once

#include <algorithm>
#include <cfloat>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/decode_attend/kernel.h"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

inline constexpr int kAttendThreads = 256;
inline constexpr int kAttendWarps = kAttendThreads / 32;
inline constexpr int kListKeys = 4096;      // of a segment, located at once
inline constexpr int kTileKeys = 16;        // of a warp, at once
inline constexpr int64_t kLeastKeys = 128;  // of a block: less is not worth a merge
inline constexpr uint32_t kExactKey = 0x80000000u;
inline constexpr float kLowestMaximum = -3.0e38f;  // differences stay finite

// In the workspace, after one counter a pair: what a block leaves of a pair that it shares with
// others. Its first segment may be the end of a pair, its last the beginning of one.
template <int kDim>
struct AttendPartial {
  float values[kAttendRows][kDim];
  float maximum[kAttendRows], sum[kAttendRows];
};

template <int kDim>
struct AttendShared {
  QueryRows<kDim> queries;
  int64_t before[kMostPairs + 1];  // keys of the pairs before each
  float maximum[kAttendWarps][kAttendRows], sum[kAttendWarps][kAttendRows];
  float total_maximum[kAttendRows], total_sum[kAttendRows];
  float weights[kAttendRows][kMostBlocks];  // of the parts of a pair
  uint32_t last;
  union {
    alignas(16) uint32_t list[kListKeys];                       // where the keys of a segment are
    alignas(16) float values[kAttendWarps][kAttendRows][kDim];  // of the warps, at its end
  };
};

template <class Element, int kDim, bool kCache>
class Attend {
 public:
  __device__ Attend(const AttendParams& params, AttendShared<kDim>& shared)
      : p_(params),
        s_(shared),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        pairs_(params.requests * params.kv_heads),
        listed_(params.lists.totals != nullptr) {}

  __device__ void run() {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    count_keys();
    const int64_t total = s_.before[pairs_];
    const int64_t share = (total + gridDim.x - 1) / gridDim.x;
    share_ = max(kLeastKeys, (share + kTileKeys - 1) / kTileKeys * kTileKeys);
    int64_t at = blockIdx.x * share_;
    const int64_t end = min(at + share_, total);
    int pair = 0;
    for (int step = kMostPairs; step > 0; step /= 2) {
      if (pair + step < pairs_ && s_.before[pair + step] <= at) pair += step;
    }
    while (at < end) {
      const int64_t first = s_.before[pair], last = min(s_.before[pair + 1], end);
      attend_segment(pair, at - first, last - first);
      at = last;
      ++pair;
    }
  }

 private:
  static constexpr int kHalves = (kDim + 63) / 64;  // of a value row: 64 dimensions each
  static constexpr int kTilesOut = kHalves * 8;     // of 8 dimensions
  static constexpr int64_t kRowBytes = kDim * 2;

  // A pair without keys counts as one, so that some block writes its result.
  __device__ void count_keys() {
    __shared__ int64_t warp_sums[kAttendWarps];
    int64_t before = 0;
    for (int tile = 0; tile < pairs_; tile += kAttendThreads) {
      const int pair = tile + thread_;
      const int64_t own = pair < pairs_ ? max(int64_t{1}, keys_of(pair)) : 0;
      int64_t scan = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int64_t up = __shfl_up_sync(~0u, scan, step);
        if (lane_ >= step) scan += up;
      }
      if (lane_ == 31) warp_sums[warp_] = scan;
      __syncthreads();
      int64_t all = 0;
      for (int w = 0; w < kAttendWarps; ++w) {
        if (w < warp_) scan += warp_sums[w];
        all += warp_sums[w];
      }
      if (pair < pairs_) s_.before[pair] = before + scan - own;
      before += all;
      __syncthreads();
    }
    if (thread_ == 0) {
      s_.before[pairs_] = before;
      if (!listed_ && blockIdx.x == 0 && p_.counters != nullptr) {
        atomicAdd(p_.counters, static_cast<unsigned long long>(p_.requests));
      }
    }
    __syncthreads();
  }

  __device__ int64_t keys_of(int pair) const {
    return p_.exact + (listed_ ? p_.lists.totals[pair].keys : p_.slots);
  }

  // Keys [begin, end) of a pair.
  __device__ void attend_segment(int pair, int64_t begin, int64_t end) {
    head_ = pair % p_.kv_heads;
    load_queries(pair);
    maximum_ = kLowestMaximum;
    sum_ = 0;
#pragma unroll
    for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out_[i][j] = 0;
    }
    const int64_t count = min(end, keys_of(pair));  // an empty pair has a segment, but no keys
    const bool list = listed_ || kCache;
    const int64_t step = list ? kListKeys : end - begin;
    for (int64_t at = begin; at < count; at += step) {
      const int64_t stop = min(at + step, count);
      if (list) {
        __syncthreads();
        locate(pair, at, stop);
      }
      __syncthreads();
      attend_keys(at, stop, list);
    }
    finish_segment(pair, begin, end);
  }

  __device__ void load_queries(int pair) {
    const int64_t first = static_cast<int64_t>(pair) * p_.group;
    make_query_rows<Element, kDim>(s_.queries, p_.group, thread_, kAttendThreads,
                                   [&](int row, int chunk, float(&x)[8]) {
                                     load_8(p_.q_dtype, p_.q, (first + row) * kDim + chunk * 8, x);
#pragma unroll
                                     for (int i = 0; i < 8; ++i) x[i] *= p_.scale;
                                   });
  }

  // ---- Where keys are.

  // s_.list of keys [begin, end): slots, or exact keys with kExactKey; with a cache rows of it.
  __device__ void locate(int pair, int64_t begin, int64_t end) {
    const RunLists& lists = p_.lists;
    const uint32_t* first = lists.first + pair * (lists.capacity + 1);
    const uint32_t* before = lists.before + pair * (lists.capacity + 1);
    const uint32_t* marks = lists.marks + pair * lists.mark_capacity;
    const uint32_t runs = listed_ ? p_.lists.totals[pair].runs : 0;
    for (int64_t k = begin + thread_; k < end; k += kAttendThreads) {
      uint32_t where = kExactKey | static_cast<uint32_t>(k);
      if (k >= p_.exact) {
        const auto key = static_cast<uint32_t>(k - p_.exact);
        where = key;
        if (listed_) {
          uint32_t low = marks[key / kMarkKeys];
          uint32_t high = before[runs] > (key / kMarkKeys + 1) * kMarkKeys
                              ? marks[key / kMarkKeys + 1]
                              : runs - 1;
          while (low < high) {
            const uint32_t middle = (low + high + 1) / 2;
            if (before[middle] <= key) {
              low = middle;
            } else {
              high = middle - 1;
            }
          }
          where = first[low] + (key - before[low]);
        }
      }
      s_.list[k - begin] = kCache ? row_in_cache(where) : where;
    }
  }

  __device__ uint32_t row_in_cache(uint32_t where) const {
    const CacheSource& cache = p_.cache;
    int64_t token;
    if ((where & kExactKey) != 0) {
      const int64_t exact = where & ~kExactKey;
      token = exact < cache.sink ? exact : cache.tokens - p_.exact + exact;
    } else {
      token = min(int64_t{cache.positions[head_ * p_.slots + where]}, cache.tokens - 1);
    }
    if (cache.block_table == nullptr) return static_cast<uint32_t>(token);
    const int64_t page = cache.block_table[token >> cache.page_shift];
    const int64_t sound = page >= 0 && page < cache.pages ? page : 0;
    return static_cast<uint32_t>(sound << cache.page_shift |
                                 (token & ((int64_t{1} << cache.page_shift) - 1)));
  }

  // Bytes from the start of keys or values; of exact keys from the start of theirs.
  __device__ __forceinline__ const char* row_at(uint32_t where, const void* slots,
                                                const void* exact) const {
    if (kCache) {
      const CacheSource& cache = p_.cache;
      const int64_t page = where >> cache.page_shift;
      const int64_t within = where & ((1u << cache.page_shift) - 1);
      return static_cast<const char*>(slots) +
             2 * (page * cache.page_stride + head_ * cache.head_stride +
                  within * cache.token_stride);
    }
    const bool is_exact = (where & kExactKey) != 0;
    const char* base = static_cast<const char*>(is_exact ? exact : slots);
    const int64_t row = head_ * (is_exact ? p_.exact : p_.slots) + (where & ~kExactKey);
    return base + row * kRowBytes;
  }

  // Row of a key, of `begin` + index; beyond the last key the last one's.
  __device__ __forceinline__ uint32_t where(int64_t begin, int64_t index, int64_t count,
                                            bool list) const {
    index = min(index, count - 1);
    if (list) return s_.list[index];
    const int64_t key = begin + index;
    return key < p_.exact ? kExactKey | static_cast<uint32_t>(key)
                          : static_cast<uint32_t>(key - p_.exact);
  }

  // ---- The keys of a warp.

  struct Values {
    uint4 words[4][kHalves];  // of 4 keys
  };

  __device__ __forceinline__ void load_keys(int64_t begin, int64_t tile, int64_t count, bool list,
                                            RowPart<kDim> (&keys)[2]) const {
    const void* slots = kCache ? p_.cache.keys : p_.keys;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t at = where(begin, tile + 8 * t + lane_ / 4, count, list);
      keys[t].load(row_at(at, slots, p_.exact_keys), lane_);
    }
  }

  // Lane 4 n + t: dimensions [64 h + 8 n, + 8) of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  __device__ __forceinline__ void load_values(int64_t begin, int64_t tile, int64_t count, bool list,
                                              Values& values) const {
    const void* slots = kCache ? p_.cache.values : p_.values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = tile + 2 * (lane_ % 4) + i % 2 + i / 2 * 8;
      const char* row = row_at(where(begin, key, count, list), slots, p_.exact_values);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int byte = 128 * h + 16 * (lane_ / 4);
        const bool inside = kDim % 64 == 0 || byte < kRowBytes;
        values.words[i][h] = inside ? load_stream(row + byte) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ void attend_keys(int64_t begin, int64_t end, bool list) {
    const int64_t count = end - begin;
    constexpr int64_t kStep = kAttendWarps * kTileKeys;
    int64_t tile = warp_ * kTileKeys;
    if (tile >= count) return;
    RowPart<kDim> keys[2];
    load_keys(begin, tile, count, list, keys);
    for (; tile < count; tile += kStep) {
      Values values;
      load_values(begin, tile, count, list, values);
      float logits[2][4] = {};
      multiply_rows<Element, kDim, 2>(s_.queries, keys, lane_, logits);
      // Under way while this tile's softmax and values are worked on.
      if (tile + kStep < count) load_keys(begin, tile + kStep, count, list, keys);
      uint32_t weights[4];
      softmax(logits, count - tile, weights);
      add_values(weights, values);
    }
  }

  // Weights of the tile as the A side of a product: upper rows rounded, lower rows the rest.
  __device__ __forceinline__ void softmax(const float (&logits)[2][4], int64_t left,
                                          uint32_t (&weights)[4]) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
      x[i] = key < left ? logits[i / 2][i % 2] + logits[i / 2][i % 2 + 2] : -INFINITY;
    }
    float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (__any_sync(~0u, top > maximum_)) {
      const float grown = fmaxf(maximum_, top);
      const float factor = exp2f(maximum_ - grown);
      maximum_ = grown;
      sum_ *= factor;
#pragma unroll
      for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out_[i][j] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = exp2f(x[i] - maximum_);
      sum_ += x[i];
    }
    split<Element>(x[0], x[1], weights[0], weights[1]);
    split<Element>(x[2], x[3], weights[2], weights[3]);
  }

  __device__ __forceinline__ void add_values(const uint32_t (&weights)[4], const Values& values) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const auto word = [&](int key) { return (&values.words[key][h].x)[w]; };
        // Pairs of keys of one dimension, from pairs of dimensions of one key.
        Element::mma(out_[8 * h + 2 * w], weights, __byte_perm(word(0), word(1), 0x5410),
                     __byte_perm(word(2), word(3), 0x5410));
        Element::mma(out_[8 * h + 2 * w + 1], weights, __byte_perm(word(0), word(1), 0x7632),
                     __byte_perm(word(2), word(3), 0x7632));
      }
    }
  }

  // ---- The end of a segment.

  __device__ AttendPartial<kDim>* partial(int64_t block, int64_t first) const {
    auto* partials = reinterpret_cast<AttendPartial<kDim>*>(static_cast<char*>(p_.workspace) +
                                                            kMostPairs * sizeof(uint32_t));
    return partials + 2 * block + (first > block * share_ ? 1 : 0);
  }

  __device__ void finish_segment(int pair, int64_t begin, int64_t end) {
    merge_warps();
    const int64_t first = s_.before[pair], keys = s_.before[pair + 1] - first;
    if (begin == 0 && end == keys) {
      write_result(pair, [&](int row, int dim) { return merged(row, dim); });
      __syncthreads();
      return;
    }
    AttendPartial<kDim>* own = partial(blockIdx.x, first);
    for (int i = thread_; i < p_.group * kDim; i += kAttendThreads) {
      own->values[i / kDim][i % kDim] = merged(i / kDim, i % kDim);
    }
    if (thread_ < p_.group) {
      own->maximum[thread_] = s_.total_maximum[thread_];
      own->sum[thread_] = s_.total_sum[thread_];
    }
    __threadfence();
    __syncthreads();
    const int64_t first_block = first / share_, last_block = (first + keys - 1) / share_;
    if (thread_ == 0) {
      auto* arrived = static_cast<uint32_t*>(p_.workspace) + pair;
      s_.last = atomicAdd(arrived, 1u) == last_block - first_block ? 1 : 0;
      if (s_.last != 0) *arrived = 0;  // for the next launch
    }
    __syncthreads();
    if (s_.last != 0) {
      __threadfence();
      merge_blocks(pair, first, first_block, last_block);
    }
    __syncthreads();
  }

  // The warps' states to s_.values, relative to one maximum.
  __device__ void merge_warps() {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) sum_ += __shfl_xor_sync(~0u, sum_, step);
    const int row = lane_ / 4;
    __syncthreads();  // the list has been read
    if (lane_ % 4 == 0) {
      s_.maximum[warp_][row] = maximum_;
      s_.sum[warp_][row] = sum_;
    }
    __syncthreads();
    float top = kLowestMaximum, sum = 0;
    for (int w = 0; w < kAttendWarps; ++w) top = fmaxf(top, s_.maximum[w][row]);
    for (int w = 0; w < kAttendWarps; ++w) sum += s_.sum[w][row] * exp2f(s_.maximum[w][row] - top);
    if (warp_ == 0 && lane_ % 4 == 0) {
      s_.total_maximum[row] = top;
      s_.total_sum[row] = sum;
    }
    const float factor = exp2f(maximum_ - top);
#pragma unroll
    for (int i = 0; i < kTilesOut; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int dim = 64 * (i / 8) + 8 * (2 * (lane_ % 4) + j) + i % 8;
        if (row < p_.group && dim < kDim) {
          s_.values[warp_][row][dim] = (out_[i][j] + out_[i][j + 2]) * factor;
        }
      }
    }
    __syncthreads();
  }

  __device__ float merged(int row, int dim) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) sum += s_.values[w][row][dim];
    return sum;
  }

  // Warp r weighs the parts of row r; then threads add up the values, several parts under way.
  __device__ void merge_blocks(int pair, int64_t first, int64_t first_block, int64_t last_block) {
    const int parts = static_cast<int>(last_block - first_block) + 1;
    if (warp_ < p_.group) {
      float top = kLowestMaximum, sum = 0;
      for (int i = lane_; i < parts; i += 32) {
        const AttendPartial<kDim>* part = partial(first_block + i, first);
        const float m = __ldcg(&part->maximum[warp_]), l = __ldcg(&part->sum[warp_]);
        s_.weights[warp_][i] = m;
        const float grown = fmaxf(top, m);
        sum = sum * exp2f(top - grown) + l * exp2f(m - grown);
        top = grown;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float m = __shfl_xor_sync(~0u, top, step), l = __shfl_xor_sync(~0u, sum, step);
        const float grown = fmaxf(top, m);
        sum = sum * exp2f(top - grown) + l * exp2f(m - grown);
        top = grown;
      }
      for (int i = lane_; i < parts; i += 32) {
        s_.weights[warp_][i] = exp2f(s_.weights[warp_][i] - top);
      }
      if (lane_ == 0) {
        s_.total_maximum[warp_] = top;
        s_.total_sum[warp_] = sum;
      }
    }
    __syncthreads();
    // kSplit threads share an element.
    constexpr int kSplit = 4;
    for (int i = thread_ / kSplit; i < p_.group * kDim / 4; i += kAttendThreads / kSplit) {
      const int row = i / (kDim / 4), dim = i % (kDim / 4) * 4;
      float4 sum = {};
#pragma unroll 5
      for (int b = thread_ % kSplit; b < parts; b += kSplit) {
        const float4 v = __ldcg(
            reinterpret_cast<const float4*>(&partial(first_block + b, first)->values[row][dim]));
        const float weight = s_.weights[row][b];
        sum.x += v.x * weight;
        sum.y += v.y * weight;
        sum.z += v.z * weight;
        sum.w += v.w * weight;
      }
#pragma unroll
      for (int step = 1; step < kSplit; step *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, step);
        sum.y += __shfl_xor_sync(~0u, sum.y, step);
        sum.z += __shfl_xor_sync(~0u, sum.z, step);
        sum.w += __shfl_xor_sync(~0u, sum.w, step);
      }
      if (thread_ % kSplit == 0) {
        *reinterpret_cast<float4*>(&s_.values[0][row][dim]) = sum;
      }
    }
    __syncthreads();
    write_result(pair, [&](int row, int dim) { return s_.values[0][row][dim]; });
  }

  template <class Value>
  __device__ void write_result(int pair, const Value& value) {
    const int64_t first = static_cast<int64_t>(pair) * p_.group;
    const bool fault = listed_ && p_.lists.totals[pair].fault != 0;
    for (int i = thread_; i < p_.group * kDim / 2; i += kAttendThreads) {
      const int row = i / (kDim / 2), dim = i % (kDim / 2) * 2;
      const float sum = s_.total_sum[row];
      const float inverse = fault ? NAN : sum == 0 ? 0 : 1 / sum;
      store_2(value(row, dim) * inverse, value(row, dim + 1) * inverse, (first + row) * kDim + dim);
    }
    if (thread_ < p_.group) {
      const float sum = s_.total_sum[thread_];
      const float lse = (s_.total_maximum[thread_] + log2f(sum)) * 0.6931471805599453f;
      p_.lse[first + thread_] = fault ? NAN : sum == 0 ? -INFINITY : lse;
    }
  }

  __device__ void store_2(float a, float b, int64_t at) const {
    if (p_.q_dtype == DType::kF32) {
      static_cast<float*>(p_.out)[at] = a;
      static_cast<float*>(p_.out)[at + 1] = b;
    } else {
      static_cast<uint32_t*>(p_.out)[at / 2] =
          p_.q_dtype == DType::kBF16 ? Bf16::pack(a, b) : F16::pack(a, b);
    }
  }

  const AttendParams& p_;
  AttendShared<kDim>& s_;
  const int thread_, lane_, warp_, pairs_;
  const bool listed_;
  int head_ = 0;
  int64_t share_ = 1;
  float maximum_ = 0, sum_ = 0;  // of query row lane / 4; sum over this lane's keys
  float out_[kTilesOut][4];      // tile 8 h + j, column n: dimension 64 h + 8 n + j
};

template <class Element, int kDim, bool kCache>
__global__ void __launch_bounds__(kAttendThreads, 1)
    decode_attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) char memory[];
  Attend<Element, kDim, kCache>(params, *reinterpret_cast<AttendShared<kDim>*>(memory)).run();
}

template <int kDim>
Status launch_attend(const AttendParams& params, cudaStream_t stream) {
  const bool bf16 = params.dtype == DType::kBF16, cache = params.cache.keys != nullptr;
  const auto kernel = bf16 ? (cache ? decode_attend_kernel<Bf16, kDim, true>
                                    : decode_attend_kernel<Bf16, kDim, false>)
                           : (cache ? decode_attend_kernel<F16, kDim, true>
                                    : decode_attend_kernel<F16, kDim, false>);
  constexpr size_t kBytes = sizeof(AttendShared<kDim>);
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(params.multiprocessors, kMostBlocks)));
  config.blockDim = dim3(kAttendThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = params.hopper ? 1 : 0;
  SQZ_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, params));
  return {};
}

}  // namespace sqz::cuda
