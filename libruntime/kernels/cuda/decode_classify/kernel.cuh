// A team of blocks serves a pair. Each block computes a slice of the hidden units, which it writes
// to the shared memory of its team, and then the logits of a slice of the buckets, which it writes
// to that of the first block, and this one chooses. What earlier kernels do not write, the weights
// above all, is under way before they end.
#pragma once

#include <cfloat>

#include "libruntime/kernels/cuda/decode_classify/choice.cuh"

namespace sqz::cuda {

template <int kDim, int kRing>
class Classify : private LookupTeam<kLookupThreads> {
 public:
  __device__ Classify(const ClassifyParams& params, int team, char* memory)
      : LookupTeam<kLookupThreads>(team,
                                   reinterpret_cast<ClassifyShared<kDim>*>(memory)->rules.team),
        c_(params),
        p_(params.lookup),
        s_(*reinterpret_cast<ClassifyShared<kDim>*>(memory)),
        arrays_(memory + sizeof(ClassifyShared<kDim>)),
        at_(params.hidden, params.lookup.level[0].clusters, params.lookup.group, team, kRing),
        pair_(static_cast<int>(blockIdx.x) / team),
        head_(pair_ % params.lookup.kv_heads),
        buckets_(params.lookup.level[0].clusters) {
    unit_begin_ = min(rank_ * at_.own_unit_tiles, at_.unit_tiles);
    unit_end_ = min(unit_begin_ + at_.own_unit_tiles, at_.unit_tiles);
    bucket_begin_ = min(rank_ * at_.own_bucket_tiles, at_.bucket_tiles);
    bucket_end_ = min(bucket_begin_ + at_.own_bucket_tiles, at_.bucket_tiles);
    column_begin_ = at_.hidden_columns * warp_ / kLookupWarps;
    column_end_ = at_.hidden_columns * (warp_ + 1) / kLookupWarps;
  }

  __device__ void run() {
    if (team_ > 1) ptx::barrier_cluster_arrive_relaxed();
    UnitStep first, second;
    load_units(unit_begin_ + warp_, first);
    load_units(unit_begin_ + warp_ + kLookupWarps, second);
    start_copies();
    const uint32_t wanted = __ldg(p_.wanted + head_);
    if (c_.frequencies != nullptr) find_angles();
    ptx::griddepcontrol_wait();
    // Not before the queries are there: attention counts on it.
    ptx::griddepcontrol_launch_dependents();
    load_queries();
    // Blocks write to each other only once all have begun.
    if (team_ > 1) ptx::barrier_cluster_wait();
    find_units(first, second);
    sync_team();
    find_logits();
    sync_team();
    if (rank_ == 0) choose(wanted);
  }

 private:
  template <class T>
  __device__ T* array(int32_t at) const {
    return reinterpret_cast<T*>(arrays_ + at);
  }

  // ---- Under way early.

  // A row of tiles of the hidden weights: the parts of a lane, and the biases of its two units.
  struct UnitStep {
    RowPart<kDim> rows[1];
    float bias[2];
  };

  __device__ void load_units(int tile, UnitStep& step) const {
    if (tile >= unit_end_) return;
    constexpr int kColumns = kDim / kWeightColumns;
    const auto* tiles =
        static_cast<const char*>(c_.hidden_weight) +
        (static_cast<int64_t>(head_) * at_.unit_tiles + tile) * kColumns * kWeightTileBytes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      step.rows[0].words[c] = load_stream(tiles + c * kWeightTileBytes + lane_ * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int unit = 8 * tile + 2 * (lane_ % 4) + i;
      step.bias[i] = unit < c_.hidden
                         ? __ldg(c_.hidden_bias + static_cast<int64_t>(head_) * c_.hidden + unit)
                         : 0.0f;
    }
  }

  __device__ void start_copies() {
    copy_tile_ = bucket_begin_;
    copy_column_ = column_begin_;
    if (rank_ == 0) {
      const uint32_t* offsets = p_.level[0].offsets + static_cast<int64_t>(head_) * (buckets_ + 1);
#pragma unroll 1
      for (int j = thread_; j < buckets_; j += kLookupThreads) {
        const auto to =
            static_cast<uint32_t>(__cvta_generic_to_shared(array<uint2>(at_.spans) + j));
        ptx::cp_async_4(to, offsets + j);
        ptx::cp_async_4(to + 4, offsets + j + 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kRing; ++i) copy_step(i);
    const int bucket = 8 * bucket_begin_ + thread_;
    if (bucket < min(8 * bucket_end_, buckets_)) prefetch(output_bias(bucket));
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
                      ((bucket_end_ - bucket_begin_ + kStepTiles - 1) / kStepTiles);
    if (team_ == 1 || steps <= kRing) return;
    const int64_t row = int64_t{at_.hidden_columns} * kWeightTileBytes;
    const auto* from = static_cast<const char*>(c_.output_weight) +
                       (static_cast<int64_t>(head_) * at_.bucket_tiles + bucket_begin_) * row;
#pragma unroll 1
    for (int64_t at = thread_ * 128; at < (bucket_end_ - bucket_begin_) * row;
         at += kLookupThreads * 128) {
      prefetch(from + at);
    }
  }

  __device__ static void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
  __device__ const float* output_bias(int bucket) const {
    return c_.output_bias + static_cast<int64_t>(head_) * buckets_ + bucket;
  }

  // The warp's next column of the next kStepTiles rows of tiles; a group of copies in any case.
  __device__ void copy_step(int slot) {
    if (copy_column_ < column_end_ && copy_tile_ < bucket_end_) {
      const auto* from =
          static_cast<const char*>(c_.output_weight) +
          ((static_cast<int64_t>(head_) * at_.bucket_tiles + copy_tile_) * at_.hidden_columns +
           copy_column_) *
              kWeightTileBytes +
          lane_ * 16;
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(slot_words(slot)));
#pragma unroll
      for (int t = 0; t < kStepTiles; ++t) {
        if (copy_tile_ + t < bucket_end_) {
          ptx::cp_async_16(to + t * kWeightTileBytes,
                           from + static_cast<int64_t>(t) * at_.hidden_columns * kWeightTileBytes,
                           16);
        }
      }
      if (++copy_column_ == column_end_) {
        copy_column_ = column_begin_;
        copy_tile_ += kStepTiles;
      }
    }
    ptx::cp_async_commit_group();
  }

  // This lane's words of a step: [kStepTiles], 32 apart.
  __device__ uint4* slot_words(int slot) const {
    return array<uint4>(at_.ring) + (warp_ * kRing + slot) * (kStepBytes / 16) + lane_;
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
    make_query_rows<F16, kDim>(s_.queries, p_.group, thread_, kLookupThreads, value);
    __syncthreads();
  }

  // ---- Hidden units.

  // As fragments like those of queries, to all blocks of the team. A lane's two units of a row are
  // one pair of words there.
  __device__ void find_units(UnitStep now, UnitStep next) {
    const int row = lane_ / 4, part = lane_ % 4;
#pragma unroll 1
    for (int tile = unit_begin_ + warp_; tile < unit_end_; tile += kLookupWarps) {
      UnitStep later;
      load_units(tile + 2 * kLookupWarps, later);
      float d[1][4] = {};
      multiply_rows<F16, kDim, 1>(s_.queries, now.rows, lane_, d);
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = d[0][i] + d[0][i + 2] + now.bias[i];
        x[i] = sum < 0 ? 0 : sum;  // a NaN stays
      }
      uint32_t high, low;
      split<F16>(x[0], x[1], high, low);
      const int place = (tile / 4 * 2 + part / 2) * 32 + row * 4 + tile % 4;
      const int32_t at = at_.activations + place * 16 + part % 2 * 8;
      if (row < p_.group) {
        for (int rank = 0; rank < team_; ++rank) tell(rank, array<uint2>(at), high, low);
      }
      now = next;
      next = later;
    }
  }

  // Writes to the shared memory of a block of the team, where this one has `own`.
  __device__ void tell(int rank, const void* own, uint32_t a, uint32_t b) const {
    if (team_ == 1) {
      *static_cast<uint2*>(const_cast<void*>(own)) = make_uint2(a, b);
      return;
    }
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(own));
    ptx::st_shared_cluster_8(ptx::mapa(address, static_cast<uint32_t>(rank)), a, b);
  }

  // ---- Logits of the slice's buckets.

  // A warp has some columns of all tiles: the fragments of hidden units are read once, and its
  // sums meet those of the others in shared memory. Lane r 4 + t of warp w then has the sums of
  // query row r and buckets 2 t, 2 t + 1 of tile w.
  __device__ void find_logits() {
    const auto* activations = array<uint4>(at_.activations);
    auto* partial = array<float2>(at_.partial);
    float maximum = kLowestLogit, sum = 0;
    int slot = 0;
#pragma unroll 1
    for (int tile = bucket_begin_; tile < bucket_end_; tile += kStepTiles) {
      float d[kStepTiles][4] = {};
#pragma unroll 1
      for (int column = column_begin_; column < column_end_; ++column) {
        // A lane reads what it copied itself.
        ptx::cp_async_wait_group<kRing - 1>();
        const uint4 even = activations[2 * column * 32 + lane_];
        const uint4 odd = activations[(2 * column + 1) * 32 + lane_];
        const uint32_t a0[4] = {even.x, even.y, even.z, even.w};
        const uint32_t a1[4] = {odd.x, odd.y, odd.z, odd.w};
        const uint4* words = slot_words(slot);
#pragma unroll
        for (int t = 0; t < kStepTiles; ++t) {
          if (tile + t < bucket_end_) {
            const uint4 w = words[t * 32];
            F16::mma(d[t], a0, w.x, w.y);
            F16::mma(d[t], a1, w.z, w.w);
          }
        }
        copy_step(slot);
        slot = slot + 1 == kRing ? 0 : slot + 1;
      }
#pragma unroll
      for (int t = 0; t < kStepTiles; ++t) {
        partial[(warp_ * kStepTiles + t) * 32 + lane_] =
            make_float2(d[t][0] + d[t][2], d[t][1] + d[t][3]);
      }
      __syncthreads();
      if (tile + warp_ < bucket_end_) add_up_tile(tile + warp_, maximum, sum);
      __syncthreads();
    }
    tell_sums(maximum, sum);
  }

  __device__ void add_up_tile(int tile, float& maximum, float& sum) {
    const auto* partial = array<float2>(at_.partial);
    float x[2] = {};
#pragma unroll
    for (int w = 0; w < kLookupWarps; ++w) {
      const float2 one = partial[(w * kStepTiles + warp_) * 32 + lane_];
      x[0] += one.x;
      x[1] += one.y;
    }
    const int row = lane_ / 4, bucket = 8 * tile + 2 * (lane_ % 4);
    if (row >= p_.group) return;
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float bias = bucket + i < buckets_ ? __ldg(output_bias(bucket + i)) : -INFINITY;
      y[i] = (x[i] + bias) * 1.4426950408889634f;
      if (!(y[i] <= maximum)) {
        sum *= exp2f(maximum - y[i]);
        maximum = y[i];
      }
      sum += exp2f(y[i] - maximum);
    }
    tell(0, array<float>(at_.logits) + row * at_.bucket_tiles * 8 + bucket, __float_as_uint(y[0]),
         __float_as_uint(y[1]));
  }

  // Maximum and sum of the slice's exponentials, a row, to the first block.
  __device__ void tell_sums(float maximum, float sum) {
    add_sums_of_lanes(maximum, sum);
    if (lane_ % 4 == 0) {
      s_.maximum[warp_][lane_ / 4] = maximum;
      s_.sum[warp_][lane_ / 4] = sum;
    }
    __syncthreads();
    if (thread_ < kMostGroup) {
      float m = kLowestLogit, l = 0;
#pragma unroll
      for (int w = 0; w < kLookupWarps; ++w) {
        add_sums(m, l, s_.maximum[w][thread_], s_.sum[w][thread_]);
      }
      tell(0, &s_.sums[rank_][thread_], __float_as_uint(m), __float_as_uint(l));
    }
  }

  // ---- The choice.

  __device__ void choose(uint32_t wanted) {
    if (!find_denominators()) {
      if (thread_ == 0) p_.lists.totals[pair_] = {0, 0, 1, 0};
      return;
    }
    ptx::cp_async_wait_group<0>();
    auto* scores = array<float>(at_.scores);
    auto* spans = array<uint2>(at_.spans);
    float best = -INFINITY, worst = INFINITY;
#pragma unroll 4
    for (int j = thread_; j < buckets_; j += kLookupThreads) {
      const uint2 span = spans[j];  // which this thread copied
      const float found = score(j, span.y - span.x);
      scores[j] = found;
      best = fmaxf(best, found);
      if (found > -INFINITY) worst = fminf(worst, found);
    }
    BucketChoice<kDim>(p_, pair_, s_, scores, spans, array<uint32_t>(at_.ring))
        .run(best, worst, wanted);
  }

  // s_.lse of the rows, base 2; false if one is NaN or infinite.
  __device__ bool find_denominators() {
    if (thread_ == 0) s_.fault = 0;
    __syncthreads();
    if (thread_ < kMostGroup * kMostTeam) {
      const int row = thread_ / kMostTeam, rank = thread_ % kMostTeam;
      float m = kLowestLogit, l = 0;
      if (rank < team_) {
        m = s_.sums[rank][row].x;
        l = s_.sums[rank][row].y;
      }
#pragma unroll
      for (int step = 1; step < kMostTeam; step *= 2) {
        const float other = __shfl_xor_sync(~0u, m, step), part = __shfl_xor_sync(~0u, l, step);
        add_sums(m, l, other, part);
      }
      if (rank == 0 && row < p_.group) {
        s_.lse[row] = m + log2f(l);
        if (!(fabsf(s_.lse[row]) <= FLT_MAX)) s_.fault = 1;
      }
    }
    __syncthreads();
    return s_.fault == 0;
  }

  // The log of the shares of the group's heads, over the size. Shares too small for a
  // float are none, as on the CPU.
  __device__ float score(int bucket, uint32_t size) const {
    const float* logit = array<float>(at_.logits) + bucket;
    float share = 0;
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) {
      if (r < p_.group) share += exp2f(logit[r * at_.bucket_tiles * 8] - s_.lse[r]);
    }
    return size == 0 ? -INFINITY : log2f(share) - log2f(static_cast<float>(size));
  }

  const ClassifyParams& c_;
  const LookupParams& p_;
  ClassifyShared<kDim>& s_;
  char* arrays_;
  const ClassifyLayout at_;
  const int pair_, head_;
  const int32_t buckets_;
  // Rows of tiles of this block; columns of the output weights of this warp.
  int unit_begin_, unit_end_, bucket_begin_, bucket_end_, column_begin_, column_end_;
  int copy_tile_ = 0, copy_column_ = 0;  // that copy_step() asks for next
};

}  // namespace sqz::cuda
