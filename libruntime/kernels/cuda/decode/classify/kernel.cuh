// Clusters of blocks serve a pair. Each block computes a slice of the hidden units, which it writes
// to the shared memory of its cluster, so that every cluster has them all, and then the logits of a
// slice of the buckets, which it writes to the scratch of the pair. The block that comes last
// chooses: no cluster ever waits for another. What earlier kernels do not write, the weights above
// all, is under way before they end. A warp executes most instructions once, one waiting for the
// other: there are to be few.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/decode/classify/choice.cuh"
#include "libruntime/kernels/cuda/decode/classify/shared.cuh"
#include "libruntime/kernels/cuda/ptx/atom.cuh"
#include "libruntime/kernels/cuda/ptx/cp_async.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

template <int kDim, int kRing>
class Classify : private LookupTeam<kClassifyThreads> {
 public:
  __device__ Classify(const ClassifyParams& params, const ClassifyTeam& team,
                      const ClassifyLayout& layout, char* memory)
      : LookupTeam<kClassifyThreads>(
            team.cluster, reinterpret_cast<ClassifyShared<kDim>*>(memory)->team, nullptr),
        c_(params),
        p_(params.lookup),
        s_(*reinterpret_cast<ClassifyShared<kDim>*>(memory)),
        arrays_(memory + sizeof(ClassifyShared<kDim>)),
        blocks_(team.cluster * team.clusters),
        block_(static_cast<int>(blockIdx.x) % blocks_),
        pair_(static_cast<int>(blockIdx.x) / blocks_),
        head_(pair_ % params.lookup.kv_heads),
        buckets_(params.lookup.level[0].clusters),
        at_(layout) {
    unit_begin_ = min(rank_ * at_.own_unit_tiles, at_.unit_tiles);
    unit_end_ = min(unit_begin_ + at_.own_unit_tiles, at_.unit_tiles);
    bucket_begin_ = min(block_ * at_.own_bucket_tiles, at_.bucket_tiles);
    bucket_end_ = min(bucket_begin_ + at_.own_bucket_tiles, at_.bucket_tiles);
    column_begin_ = at_.hidden_columns * warp_ / kClassifyWarps;
    column_end_ = at_.hidden_columns * (warp_ + 1) / kClassifyWarps;
  }

  __device__ void run() {
    if (team_ > 1) ptx::barrier_cluster_arrive_relaxed();
    UnitStep units;
    load_units(unit_begin_ + warp_, units);
    start_copies();
    const uint32_t wanted = __ldg(p_.wanted + head_);
    if (c_.frequencies != nullptr) find_angles();
    ptx::griddepcontrol_wait();
    // Not before the queries are there: attention counts on it.
    ptx::griddepcontrol_launch_dependents();
    load_queries();
    // Blocks write to each other only once all have begun.
    if (team_ > 1) ptx::barrier_cluster_wait();
    find_units(units);
    sync_team();
    find_logits();
    if (comes_last()) choose(wanted);
  }

 private:
  template <class T>
  __device__ T* array(int32_t at) const {
    return reinterpret_cast<T*>(arrays_ + at);
  }

  // ---- Under way early.

  static constexpr int kUnitTiles = kDim <= 128 ? 4 : 2;  // that registers have room for

  // Rows of tiles of the hidden weights, kClassifyWarps apart: the parts of a lane, and the biases
  // of its two units.
  struct UnitStep {
    RowPart<kDim> rows[kUnitTiles];
    float bias[kUnitTiles][2];
  };

  __device__ void load_units(int tile, UnitStep& step) const {
#pragma unroll
    for (int i = 0; i < kUnitTiles; ++i, tile += kClassifyWarps) {
      if (tile < unit_end_) load_unit_tile(tile, step.rows[i], step.bias[i]);
    }
  }

  __device__ void load_unit_tile(int tile, RowPart<kDim>& row, float (&bias)[2]) const {
    constexpr int kColumns = kDim / kWeightColumns;
    const auto* tiles =
        static_cast<const char*>(c_.network.hidden_weight) +
        (static_cast<int64_t>(head_) * at_.unit_tiles + tile) * kColumns * kWeightTileBytes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      row.words[c] = load_stream(tiles + c * kWeightTileBytes + lane_ * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int unit = 8 * tile + 2 * (lane_ % 4) + i;
      bias[i] = unit < c_.network.hidden
                    ? __ldg(c_.network.hidden_bias +
                            static_cast<int64_t>(head_) * c_.network.hidden + unit)
                    : 0.0f;
    }
  }

  __device__ void start_copies() {
    const uint32_t* offsets = p_.level[0].offsets + static_cast<int64_t>(head_) * (buckets_ + 1);
#pragma unroll 1
    for (int j = thread_; j < buckets_; j += kClassifyThreads) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(array<uint2>(at_.spans) + j));
      ptx::cp_async_4(to, offsets + j);
      ptx::cp_async_4(to + 4, offsets + j + 1);
    }
    const int first = 8 * bucket_begin_;
#pragma unroll 1
    for (int j = first + thread_; j < min(8 * bucket_end_, buckets_); j += kClassifyThreads) {
      const auto to =
          static_cast<uint32_t>(__cvta_generic_to_shared(array<float>(at_.biases) + (j - first)));
      ptx::cp_async_4(to, c_.network.output_bias + static_cast<int64_t>(head_) * buckets_ + j);
    }
    copy_tile_ = bucket_begin_;
    copy_column_ = column_begin_;
#pragma unroll 1
    for (int i = 0; i < kRing; ++i) copy_step(i);
    ask_ahead();
    // Units that there are none of, in the last column of tiles.
    if (thread_ < 32 && at_.unit_tiles % 4 != 0 && lane_ % 4 >= at_.unit_tiles % 4) {
      auto* last = array<uint4>(at_.activations) + (at_.hidden_columns - 1) * 64 + lane_;
      last[0] = last[32] = make_uint4(0, 0, 0, 0);
    }
  }

  // The weights that the ring has no room for, into the L2. With blocks for many requests on every
  // multiprocessor others wait for their own.
  __device__ void ask_ahead() const {
    const int steps = (column_end_ - column_begin_) *
                      ((bucket_end_ - bucket_begin_ + at_.step_tiles - 1) / at_.step_tiles);
    if (blocks_ == 1 || steps <= kRing) return;
    const int64_t row = int64_t{at_.hidden_columns} * kWeightTileBytes;
    const auto* from = static_cast<const char*>(c_.network.output_weight) +
                       (static_cast<int64_t>(head_) * at_.bucket_tiles + bucket_begin_) * row;
#pragma unroll 1
    for (int64_t at = thread_ * 128; at < (bucket_end_ - bucket_begin_) * row;
         at += kClassifyThreads * 128) {
      ptx::prefetch_l2(from + at);
    }
  }

  // The warp's next column of the next rows of tiles; a group of copies in any case.
  __device__ void copy_step(int slot) {
    if (copy_column_ < column_end_ && copy_tile_ < bucket_end_) {
      const int64_t row = int64_t{at_.hidden_columns} * kWeightTileBytes;
      const auto* from = static_cast<const char*>(c_.network.output_weight) +
                         (static_cast<int64_t>(head_) * at_.bucket_tiles + copy_tile_) * row +
                         copy_column_ * kWeightTileBytes + lane_ * 16;
      auto to = static_cast<uint32_t>(__cvta_generic_to_shared(slot_words(slot)));
      const int tiles = min(at_.step_tiles, bucket_end_ - copy_tile_);
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        ptx::cp_async_16(to, from, 16);
        to += kWeightTileBytes;
        from += row;
      }
      if (++copy_column_ == column_end_) {
        copy_column_ = column_begin_;
        copy_tile_ += at_.step_tiles;
      }
    }
    ptx::cp_async_commit_group();
  }

  // This lane's words of a step: [step_tiles], 32 apart.
  __device__ const uint4* slot_words(int slot) const {
    return array<uint4>(at_.ring) + (warp_ * kRing + slot) * at_.step_tiles * 32 + lane_;
  }

  // ---- Queries.

  __device__ void find_angles() {
    const float position = c_.positions[pair_ / p_.kv_heads];
    if (thread_ < kDim / 2) {
      const float angle = position * __ldg(c_.frequencies + thread_);
      s_.cosines[thread_] = cosf(angle) * c_.shrink;
      s_.sines[thread_] = sinf(angle) * c_.shrink;
    }
    __syncthreads();
  }

  __device__ void load_queries() {
    const int64_t first = static_cast<int64_t>(pair_) * p_.group;
    const auto value = [&](int row, int chunk, float(&x)[8]) {
      load_8(p_.q_dtype, p_.q, (first + row) * kDim + chunk * 8, x);
      if (c_.frequencies == nullptr) return;
      constexpr int kHalf = kDim / 2;
      const bool upper = chunk * 8 >= kHalf;
      const int other = chunk * 8 + (upper ? -kHalf : kHalf), angle = chunk * 8 % kHalf;
      float y[8];
      load_8(p_.q_dtype, p_.q, (first + row) * kDim + other, y);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float sine = s_.sines[angle + i];
        x[i] = x[i] * s_.cosines[angle + i] + y[i] * (upper ? -sine : sine);
      }
    };
    make_query_rows<F16, kDim>(s_.queries, p_.group, thread_, kClassifyThreads, value);
    __syncthreads();
  }

  // ---- Hidden units.

  // As fragments like those of queries, to all blocks of the cluster. A lane's two units of a row
  // are one pair of words there.
  __device__ void find_units(UnitStep& units) {
    const int row = lane_ / 4, part = lane_ % 4;
#pragma unroll 1
    for (int tile = unit_begin_ + warp_; tile < unit_end_; tile += kUnitTiles * kClassifyWarps) {
      float d[kUnitTiles][4] = {};
      multiply_rows<F16, kDim, kUnitTiles>(s_.queries, units.rows, lane_, d);
      uint2 words[kUnitTiles];
#pragma unroll
      for (int t = 0; t < kUnitTiles; ++t) {
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = d[t][i] + d[t][i + 2] + units.bias[t][i];
          x[i] = sum < 0 ? 0 : sum;  // a NaN stays
        }
        split<F16>(x[0], x[1], words[t].x, words[t].y);
      }
      load_units(tile + kUnitTiles * kClassifyWarps, units);
      // Four neighbours are a column of the output weights; kClassifyWarps tiles are two.
      const int place = (tile / 4 * 2 + part / 2) * 32 + row * 4 + tile % 4;
      if (row < p_.group) tell_units(tile, at_.activations + place * 16 + part % 2 * 8, words);
    }
  }

  // words: of tiles kClassifyWarps apart, the first of which belongs at `at`.
  __device__ void tell_units(int tile, int32_t at, const uint2 (&words)[kUnitTiles]) const {
    constexpr int kApart = kClassifyWarps / 4 * 1024;
    const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(arrays_ + at));
#pragma unroll 1
    for (int rank = 0; rank < team_; ++rank) {
      const uint32_t to = ptx::mapa(own, static_cast<uint32_t>(rank));
#pragma unroll
      for (int t = 0; t < kUnitTiles; ++t) {
        if (tile + t * kClassifyWarps >= unit_end_) continue;
        if (team_ == 1) {
          *array<uint2>(at + t * kApart) = words[t];
        } else {
          ptx::st_shared_cluster_8(to + t * kApart, words[t].x, words[t].y);
        }
      }
    }
  }

  // ---- Logits of the slice's buckets.

  __device__ int32_t exchange_bytes() const {
    return at_.exchange_bytes(p_.group, blocks_);
  }
  // Where the pair's blocks exchange what begins at at_.logits.
  __device__ char* exchange() const {
    return blocks_ == 1 ? arrays_ + at_.logits
                        : static_cast<char*>(c_.scratch) + kScratchBegin +
                              static_cast<int64_t>(pair_) * exchange_bytes();
  }

  // A warp has some columns of all tiles: the fragments of hidden units are read once, and its
  // sums meet those of the others in shared memory.
  __device__ void find_logits() {
    const auto* activations = array<uint4>(at_.activations) + lane_;
    float maximum = kLowestLogit, sum = 0;
    int slot = 0;
    uint4 w[kStepTiles] = {};
    ptx::cp_async_wait_group<kRing - 1>();  // the biases
#pragma unroll 1
    for (int tile = bucket_begin_; tile < bucket_end_; tile += at_.step_tiles) {
      float d[kStepTiles][4] = {};
#pragma unroll 1
      for (int column = column_begin_; column < column_end_; ++column) {
        // A lane reads what it copied itself.
        ptx::cp_async_wait_group<kRing - 1>();
        const uint4 even = activations[2 * column * 32];
        const uint4 odd = activations[(2 * column + 1) * 32];
        const uint32_t a0[4] = {even.x, even.y, even.z, even.w};
        const uint32_t a1[4] = {odd.x, odd.y, odd.z, odd.w};
        const uint4* words = slot_words(slot);
#pragma unroll
        for (int t = 0; t < kStepTiles; ++t) {
          if (t < at_.step_tiles) w[t] = words[t * 32];
        }
#pragma unroll
        for (int t = 0; t < kStepTiles; ++t) F16::mma(d[t], a0, w[t].x, w[t].y);
#pragma unroll
        for (int t = 0; t < kStepTiles; ++t) F16::mma(d[t], a1, w[t].z, w[t].w);
        copy_step(slot);
        slot = slot + 1 == kRing ? 0 : slot + 1;
      }
      __syncthreads();  // partial sums may take the place of the hidden units
#pragma unroll
      for (int t = 0; t < kStepTiles; ++t) {
        if (t < at_.step_tiles) {
          array<float2>(at_.partial)[(warp_ * at_.step_tiles + t) * 32 + lane_] =
              make_float2(d[t][0] + d[t][2], d[t][1] + d[t][3]);
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int t = warp_; t < min(at_.step_tiles, bucket_end_ - tile); t += kClassifyWarps) {
        add_up_tile(tile + t, t, maximum, sum);
      }
    }
    tell_sums(maximum, sum);
  }

  // Tile t of the step. Lane r 4 + i has the sums of query row r and buckets 2 i, 2 i + 1.
  __device__ void add_up_tile(int tile, int t, float& maximum, float& sum) {
    const auto* partial = array<float2>(at_.partial) + t * 32 + lane_;
    float x[2] = {};
#pragma unroll
    for (int w = 0; w < kClassifyWarps; ++w) {
      const float2 one = partial[w * at_.step_tiles * 32];
      x[0] += one.x;
      x[1] += one.y;
    }
    const int row = lane_ / 4, bucket = 8 * tile + 2 * (lane_ % 4);
    if (row >= p_.group) return;
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float bias = array<float>(at_.biases)[bucket + i - 8 * bucket_begin_];
      y[i] = bucket + i < buckets_ ? (x[i] + bias) * 1.4426950408889634f : -INFINITY;
    }
    // A NaN stays in the sum.
    const float top = fmaxf(maximum, fmaxf(y[0], y[1]));
    sum = sum * ptx::ex2_approx(maximum - top) + ptx::ex2_approx(y[0] - top) +
          ptx::ex2_approx(y[1] - top);
    maximum = top;
    auto* to = reinterpret_cast<float*>(exchange()) + row * at_.bucket_tiles * 8 + bucket;
    *reinterpret_cast<float2*>(to) = make_float2(y[0], y[1]);
  }

  // Maximum and sum of the exponentials of a warp's tiles, a row.
  __device__ void tell_sums(float maximum, float sum) {
    add_sums_of_lanes(maximum, sum);
    if (lane_ % 4 != 0 || lane_ / 4 >= p_.group) return;
    auto* to = reinterpret_cast<float2*>(exchange() + at_.sums - at_.logits);
    to[(block_ * kClassifyWarps + warp_) * kMostGroup + lane_ / 4] = make_float2(maximum, sum);
  }

  // ---- The choice.

  // Whether all blocks of the pair have sent their part.
  __device__ bool comes_last() {
    __syncthreads();
    if (blocks_ == 1) return true;
    if (thread_ == 0) {
      s_.arrived = ptx::atom_inc_acq_rel(static_cast<uint32_t*>(c_.scratch) + pair_, blocks_ - 1);
    }
    __syncthreads();
    return static_cast<int>(s_.arrived) == blocks_ - 1;
  }

  // The logits of the buckets that this thread scores, on their way from the scratch.
  __device__ void fetch_logits() const {
    const int row = at_.bucket_tiles * 32;
#pragma unroll 1
    for (int j = 4 * thread_; j < buckets_; j += 4 * kClassifyThreads) {
      const char* from = exchange() + 4 * j;
      auto to = static_cast<uint32_t>(__cvta_generic_to_shared(arrays_ + at_.logits + 4 * j));
#pragma unroll 4
      for (int r = 0; r < p_.group; ++r, from += row, to += row) ptx::cp_async_16(to, from, 16);
    }
    ptx::cp_async_commit_group();
  }

  __device__ void choose(uint32_t wanted) {
    if (blocks_ > 1) fetch_logits();
    if (warp_ < p_.group) find_denominator();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    bool sound = true;
#pragma unroll 1
    for (int r = 0; r < p_.group; ++r) sound = sound && fabsf(s_.lse[r]) <= FLT_MAX;
    if (!sound) {
      if (thread_ == 0) end_with_fault(p_, pair_);
      return;
    }
    auto* scores = array<float>(at_.scores);
    auto* spans = array<uint2>(at_.spans);
#pragma unroll 1
    for (int j = 4 * thread_; j < buckets_; j += 4 * kClassifyThreads) {
      float found[4];
      score_4(j, spans, found);
      *reinterpret_cast<float4*>(scores + j) = make_float4(found[0], found[1], found[2], found[3]);
    }
    __syncthreads();  // the logits have been read
    auto* words = array<uint32_t>(at_.choice);
    auto& shared = *reinterpret_cast<BucketChoice::Shared*>(words + 8 * at_.bucket_tiles);
    BucketChoice(p_, pair_, shared, words, spans).run(scores, wanted);
  }

  // s_.lse of this warp's row, base 2; NaN or infinite if a logit is.
  __device__ void find_denominator() {
    constexpr int kParts = kMostTeam * kClassifyWarps / 32;  // of a lane
    const auto* sums = reinterpret_cast<const float2*>(exchange() + at_.sums - at_.logits) + warp_;
    float2 part[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int from = lane_ + 32 * i;
      part[i] = make_float2(kLowestLogit, 0);
      if (from >= blocks_ * kClassifyWarps) continue;
      part[i] = blocks_ == 1 ? sums[from * kMostGroup] : __ldcg(sums + from * kMostGroup);
    }
    float m = kLowestLogit, l = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) m = fmaxf(m, part[i].x);
    const float top = score_of(__reduce_max_sync(~0u, rank_of(m)));
#pragma unroll
    for (int i = 0; i < kParts; ++i) l += part[i].y * ptx::ex2_approx(part[i].x - top);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(~0u, l, step);
    if (lane_ == 0) s_.lse[warp_] = top + __log2f(l);
  }

  // The logs of the shares of the group's heads, over the sizes, of buckets j to j + 3. Shares too
  // small for a float are none, as on the CPU; and so are those behind the last bucket.
  __device__ void score_4(int j, const uint2* spans, float (&found)[4]) const {
    float share[4] = {};
#pragma unroll 4
    for (int r = 0; r < p_.group; ++r) {
      const float4 y = *(array<float4>(at_.logits) + (r * at_.bucket_tiles * 8 + j) / 4);
      const float lse = s_.lse[r];
      share[0] += ptx::ex2_approx(y.x - lse);
      share[1] += ptx::ex2_approx(y.y - lse);
      share[2] += ptx::ex2_approx(y.z - lse);
      share[3] += ptx::ex2_approx(y.w - lse);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t size = spans[j + i].y - spans[j + i].x;
      const float sum = size == 0 ? 0 : share[i];
      found[i] = __log2f(__fdividef(sum, static_cast<float>(max(size, 1u))));
    }
  }

  const ClassifyParams& c_;
  const LookupParams& p_;
  ClassifyShared<kDim>& s_;
  char* arrays_;
  const int blocks_, block_;  // of the pair; which of them this is
  const int pair_, head_;
  const int32_t buckets_;
  const ClassifyLayout& at_;
  // Rows of tiles of this block; columns of the output weights of this warp.
  int unit_begin_, unit_end_, bucket_begin_, bucket_end_, column_begin_, column_end_;
  int copy_tile_ = 0, copy_column_ = 0;  // that copy_step() asks for next
};

}  // namespace sqz::cuda
