// The kernel: queries in the forms that products take, clusters, keys, and then their values. A
// block adds up what its own keys, exact keys and estimated clusters are worth; the team merges.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/keys.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

template <class Element, int kDim>
class DecodeCodes : private CodedKeys<Element, kDim> {
 public:
  using Base = CodedKeys<Element, kDim>;
  using Base::Base;

  __device__ void run() {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (!attend() && rank_ == 0) write_fault();
    this->end_search();
    this->leave_team();
  }

 private:
  using Base::c_;
  using Base::chosen_;
  using Base::chunks_;
  using Base::first_;
  using Base::head_;
  using Base::lane_;
  using Base::list_;
  using Base::logits_;
  using Base::p_;
  using Base::pair_;
  using Base::rank_;
  using Base::s_;
  using Base::stride_;
  using Base::team_;
  using Base::thread_;
  using Base::warp_;
  static constexpr int kWords = kDim / 4;             // of four neighbouring dimensions
  static constexpr int kPasses = (kWords + 31) / 32;  // of a warp over them
  static constexpr int kPartial = kDim + 2;           // floats of a partial's row

  // All of the team have read the last histogram when it returns.
  __device__ bool attend() {
    if (c_.estimate) prefetch_means();
    this->take_level(p_.level[0], false);
    load_queries();
    if (!this->choose_clusters()) return false;
    if (c_.key_codes.bits > 0 && !c_.everything) finish_turned();
    this->list_chunks();
    this->score_exact();
    if (!this->choose_keys()) return false;
    if (c_.key_fates != nullptr) tell_fates();
    if (c_.out == nullptr) {
      this->sync_team();
      return true;
    }
    weigh();
    add_values();
    this->sync_team();
    merge();
    tell_counters();
    return true;
  }

  // The mean values of all clusters, into the L2 cache while the team chooses: all are needed.
  __device__ void prefetch_means() const {
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const int64_t bytes = int64_t{p_.level[k].clusters} * Base::kRowBytes;
      const char* means = static_cast<const char*>(c_.value_means[k]) + head_ * bytes;
      for (int64_t at = (rank_ * kCodedThreads + thread_) * int64_t{128}; at < bytes;
           at += int64_t{128} * kCodedThreads * team_) {
        ptx::prefetch_l2(means + at);
      }
    }
  }

  // ---- Queries.

  __device__ void load_queries() {
    const int64_t first = int64_t{pair_} * p_.group;
    for (int i = thread_; i < kMostGroup * kDim; i += kCodedThreads) {
      const int row = i / kDim;
      s_.query[row][i % kDim] =
          row < p_.group ? load_1(p_.q_dtype, p_.q, first * kDim + i) * p_.scale : 0.0f;
    }
    if (thread_ == 0) s_.vectors = s_.codes = 0;
    if (thread_ < 16) {
      constexpr int8_t kLevels[16] = {-127, -96, -75, -58, -44, -31, -18, -6,
                                      6,    18,  31,  44,  58,  75,  96,  127};
      s_.levels4[thread_] = kLevels[thread_];
    }
    __syncthreads();
    make_query_rows<Element, kDim>(s_.queries, p_.group, thread_, kCodedThreads,
                                   [&](int row, int chunk, float(&x)[8]) {
#pragma unroll
                                     for (int i = 0; i < 8; ++i)
                                       x[i] = s_.query[row][8 * chunk + i];
                                   });
    make_query_parts<Rows8<kDim>>(s_.row_parts, s_.query);
    if (c_.key_codes.bits > 0 && !c_.everything) turn_queries();
  }

  // This block's dimensions of the queries times the rotation, for the team.
  __device__ void turn_queries() {
    const int begin = kDim * rank_ / team_, count = kDim * (rank_ + 1) / team_ - begin;
    float* turned = c_.workspace.turned + int64_t{pair_} * kMostGroup * kDim;
#pragma unroll 1
    for (int first = 0; first < p_.group * count; first += kCodedThreads / 16) {
      const int item = first + thread_ / 16, row = item / count, dim = begin + item % count;
      const bool is = item < p_.group * count;
      float sum = 0;
      for (int i = thread_ % 16; is && i < kDim; i += 16) {
        sum += s_.query[row][i] * __ldg(c_.rotation + i * kDim + dim);
      }
#pragma unroll
      for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (is && thread_ % 16 == 0) turned[row * kDim + dim] = sum;
    }
  }
  // Once the team has turned its parts. s_.query is not needed any more.
  __device__ void finish_turned() {
    const float* turned = c_.workspace.turned + int64_t{pair_} * kMostGroup * kDim;
    for (int i = thread_; i < p_.group * kDim; i += kCodedThreads) {
      s_.query[i / kDim][i % kDim] = __ldcg(turned + i);
    }
    __syncthreads();
    if (c_.key_codes.bits == 2) {
      make_query_parts<KeyCodes<kDim, 2>>(s_.code_parts, s_.query);
    } else {
      make_query_parts<KeyCodes<kDim, 1>>(s_.code_parts, s_.query);
    }
  }

  // ---- Weights.

  __device__ uint32_t exact_keys() const {
    return this->own_of(c_.exact);
  }
  __device__ uint32_t clusters() const {
    return first_ + this->own_;
  }  // this block's, of all levels
  __device__ bool is_estimated(uint32_t cluster) const {
    return c_.estimate && this->fates_[cluster] == kFateEstimated;
  }

  // Logits become weights relative to s_.top, the block's greatest; s_.total are their sums.
  __device__ void weigh() {
    const uint32_t keys = chunks_ * kChunkKeys;
    float rows[kMostGroup];
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) rows[r] = kLowestLogit;
    const auto raise = [&](const auto& logit) {
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r < p_.group) rows[r] = fmaxf(rows[r], logit(r));
      }
    };
#pragma unroll 1
    for (uint32_t i = thread_; i < keys; i += kCodedThreads) {
      if (counts(i)) raise([&](int r) { return this->logit_at(i, r); });
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < exact_keys(); i += kCodedThreads) {
      raise([&](int r) { return this->exact_logits_[i * stride_ + r]; });
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < clusters(); i += kCodedThreads) {
      if (!is_estimated(i)) continue;
      const float size = log2f(static_cast<float>(this->sizes_[i]));
      raise([&](int r) { return logits_[i * stride_ + r] + size; });
    }
    reduce_rows(rows, s_.top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) rows[r] = 0;
      // A warp has a chunk.
#pragma unroll 1
    for (uint32_t i = thread_; i < keys; i += kCodedThreads) {
      const bool has_mean = c_.coded_values.bits > 0 || !this->is_chosen(i);
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r >= p_.group) continue;
        float& logit = this->logit_at(i, r);
        const float weight = counts(i) ? ptx::ex2_approx(logit - s_.top[r]) : 0;
        logit = weight;
        rows[r] += weight;
        float mean = has_mean ? weight : 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) mean += __shfl_xor_sync(~0u, mean, step);
        if (lane_ == 0) this->mean_weights_[i / kChunkKeys * stride_ + r] = mean;
      }
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < exact_keys(); i += kCodedThreads) {
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r >= p_.group) continue;
        float& logit = this->exact_logits_[i * stride_ + r];
        logit = ptx::ex2_approx(logit - s_.top[r]);
        rows[r] += logit;
      }
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < clusters(); i += kCodedThreads) {
      if (!is_estimated(i)) continue;
      const float size = log2f(static_cast<float>(this->sizes_[i]));
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r >= p_.group) continue;
        float& logit = logits_[i * stride_ + r];
        logit = ptx::ex2_approx(logit + size - s_.top[r]);
        rows[r] += logit;
      }
    }
    reduce_rows(rows, s_.total, [](float a, float b) { return a + b; });
    // The keys of a cluster that was let through weigh its mean value together.
#pragma unroll 1
    for (uint32_t i = thread_; i < chunks_; i += kCodedThreads) {
      const uint32_t cluster = this->cluster_of(i);
      if (i > 0 && this->cluster_of(i - 1) == cluster) continue;
#pragma unroll
      for (int r = 0; r < kMostGroup; ++r) {
        if (r >= p_.group) continue;
        float weight = 0;
        for (uint32_t c = i; c < chunks_ && this->cluster_of(c) == cluster; ++c) {
          weight += this->mean_weights_[c * stride_ + r];
        }
        logits_[cluster * stride_ + r] = weight;
      }
    }
    __syncthreads();
  }

  __device__ bool counts(uint32_t place) const {
    return this->is_chosen(place) || (c_.estimate && this->is_guessed(place));
  }

  // Of all threads of the block, in one order.
  template <class Join>
  __device__ void reduce_rows(const float (&rows)[kMostGroup], float (&to)[kMostGroup],
                              const Join& join) {
#pragma unroll
    for (int r = 0; r < kMostGroup; ++r) {
      float x = rows[r];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
      if (lane_ == 0) s_.maximum[warp_][r] = x;
    }
    __syncthreads();
    if (thread_ < kMostGroup) {
      float x = s_.maximum[0][thread_];
      for (int w = 1; w < kCodedWarps; ++w) x = join(x, s_.maximum[w][thread_]);
      to[thread_] = x;
    }
    __syncthreads();
  }

  // ---- Values.

  // Of a warp: this lane's dimensions 4 (lane + 32 pass) and the next three.
  struct Sum {
    float rows[kMostGroup][kPasses][4];
  };

  // Adds scale(j) weight(j, r) times the row `load(j, word)` of raw words for the warp's j below
  // count, with the loads of kAhead rows under way.
  template <class Raw, class Load, class Floats, class Scale, class Weight>
  __device__ __forceinline__ void add_rows(uint32_t count, const Load& load, const Floats& floats,
                                           const Scale& scale, const Weight& weight,
                                           Sum& sum) const {
    constexpr int kAhead = (kPasses > 1 ? 32 : 64) / sizeof(Raw);
#pragma unroll 1
    for (uint32_t first = warp_; first < count; first += kAhead * kCodedWarps) {
      Raw raw[kAhead][kPasses];
      float scales[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const uint32_t j = min(first + a * kCodedWarps, count - 1);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          raw[a][pass] = load(j, min(lane_ + 32 * pass, kWords - 1));
        }
        scales[a] = scale(j);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const uint32_t j = min(first + a * kCodedWarps, count - 1);
        if (j != first + a * kCodedWarps) scales[a] = 0;
        float x[kPasses][4];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) floats(raw[a][pass], lane_ + 32 * pass, x[pass]);
#pragma unroll
        for (int r = 0; r < kMostGroup; ++r) {
          if (r >= p_.group) continue;
          const float w = scales[a] * weight(j, r);
#pragma unroll
          for (int i = 0; i < 4 * kPasses; ++i) sum.rows[r][i / 4][i % 4] += w * x[i / 4][i % 4];
        }
      }
    }
  }

  // Null: a row of zeros.
  template <class RowAt, class Weight>
  __device__ __forceinline__ void add_rows_16(uint32_t count, const RowAt& row_at,
                                              const Weight& weight, Sum& sum) const {
    add_rows<uint2>(
        count,
        [&](uint32_t j, int word) {
          const char* row = row_at(j);
          return row == nullptr ? make_uint2(0, 0)
                                : __ldg(reinterpret_cast<const uint2*>(row) + word);
        },
        [](const uint2& raw, int, float(&x)[4]) {
          x[0] = Element::low(raw.x);
          x[1] = Element::high(raw.x);
          x[2] = Element::low(raw.y);
          x[3] = Element::high(raw.y);
        },
        [](uint32_t) { return 1.0f; }, weight, sum);
  }

  __device__ void add_values() {
    Sum sum = {};
    const auto of_chosen = [&](uint32_t j, int r) { return this->logit_at(list_[j], r); };
    if (c_.coded_values.bits > 0) {
      add_codes(of_chosen, sum);
    } else {
      add_rows_16(
          chosen_, [&](uint32_t j) { return Base::row_16(c_.values, this->row_of(list_[j])); },
          of_chosen, sum);
    }
    if (c_.coded_values.rotated()) {
      leave(1, sum);
      sum = {};
    }
    const int64_t exact = int64_t{head_} * c_.exact;
    add_rows_16(
        exact_keys(),
        [&](uint32_t j) { return Base::row_16(c_.exact_values, exact + this->cluster_at(j)); },
        [&](uint32_t j, int r) { return this->exact_logits_[j * stride_ + r]; }, sum);
    uint32_t first = 0;
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const uint32_t own = this->own_of(p_.level[k].clusters);
      const char* means = Base::row_16(c_.value_means[k], int64_t{head_} * p_.level[k].clusters);
      const bool finest = k + 1 == p_.levels;
      add_rows_16(
          own,
          [&](uint32_t j) -> const char* {
            const bool is =
                is_estimated(first + j) || (finest && this->fates_[first + j] == kFateChosen);
            return is ? Base::row_16(means, this->cluster_at(j)) : nullptr;
          },
          [&](uint32_t j, int r) { return logits_[(first + j) * stride_ + r]; }, sum);
      first += own;
    }
    leave(0, sum);
  }

  // What the rows of codes add to their means, rotated or not.
  template <class Weight>
  __device__ void add_codes(const Weight& weight, Sum& sum) const {
    const auto* codes = reinterpret_cast<const char*>(c_.coded_values.codes);
    const auto scale = [&](uint32_t j) {
      return Base::scale_at(c_.coded_values.scales, this->row_of(list_[j]));
    };
    if (c_.coded_values.bits == 8) {
      add_rows<uint32_t>(
          chosen_,
          [&](uint32_t j, int word) {
            return __ldg(reinterpret_cast<const uint32_t*>(codes + this->row_of(list_[j]) * kDim) +
                         word);
          },
          [](uint32_t raw, int, float(&x)[4]) {
            raw ^= 0x80808080u;  // 2^23 + a byte as a float
            x[0] = __uint_as_float(__byte_perm(raw, 0x4B000000u, 0x7440)) - 8388736.0f;
            x[1] = __uint_as_float(__byte_perm(raw, 0x4B000000u, 0x7441)) - 8388736.0f;
            x[2] = __uint_as_float(__byte_perm(raw, 0x4B000000u, 0x7442)) - 8388736.0f;
            x[3] = __uint_as_float(__byte_perm(raw, 0x4B000000u, 0x7443)) - 8388736.0f;
          },
          scale, weight, sum);
      return;
    }
    // 4 bits: the lower half of the dimensions in the lower halves of the bytes.
    add_rows<uint32_t>(
        chosen_,
        [&](uint32_t j, int word) {
          return __ldg(
              reinterpret_cast<const uint32_t*>(codes + this->row_of(list_[j]) * (kDim / 2)) +
              word % (kWords / 2));
        },
        [&](uint32_t raw, int word, float(&x)[4]) {
          raw >>= word < kWords / 2 ? 0 : 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = s_.levels4[raw >> 8 * i & 15];
        },
        scale, weight, sum);
  }

  __device__ float* partial_of(int rank, int which, int row) const {
    const int64_t block = static_cast<int>(blockIdx.x) - rank_ + rank;
    return c_.workspace.partials + ((2 * block + which) * kMostGroup + row) * kPartial;
  }

  // The sums of the warps, for the team.
  __device__ void leave(int which, const Sum& sum) {
    constexpr int kAtOnce = CodedShared<kDim>::kRowsAtOnce;
#pragma unroll
    for (int first = 0; first < kMostGroup; first += kAtOnce) {
      if (first >= p_.group) break;
      __syncthreads();
#pragma unroll
      for (int r = first; r < min(first + kAtOnce, kMostGroup); ++r) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const int word = lane_ + 32 * pass;
          if (word >= kWords) continue;
          *reinterpret_cast<float4*>(&s_.rows[r - first][warp_][4 * word]) =
              make_float4(sum.rows[r][pass][0], sum.rows[r][pass][1], sum.rows[r][pass][2],
                          sum.rows[r][pass][3]);
        }
      }
      __syncthreads();
      const int row = first + thread_ / kDim;
      if (thread_ >= kAtOnce * kDim || row >= p_.group) continue;
      float x = 0;
#pragma unroll
      for (int w = 0; w < kCodedWarps; ++w) x += s_.rows[row - first][w][thread_ % kDim];
      partial_of(rank_, which, row)[thread_ % kDim] = x;
    }
    if (thread_ >= p_.group) return;
    float* to = partial_of(rank_, which, thread_) + kDim;
    to[0] = s_.top[thread_];
    to[1] = s_.total[thread_];
  }

  // ---- The result.

  // s_.maximum[rank][row]: what the partials of a block are multiplied by; s_.top and s_.total of
  // all blocks.
  __device__ void weigh_partials() {
    if (thread_ < kMostGroup * kMostTeam) {
      const int row = thread_ / kMostTeam, rank = thread_ % kMostTeam;
      float top = kLowestLogit, total = 0;
      if (rank < team_ && row < p_.group) {
        const float* part = partial_of(rank, 0, row) + kDim;
        top = __ldcg(part);
        total = __ldcg(part + 1);
      }
      const float own = top;
      this->add_sums_of_team(top, total);
      s_.maximum[rank][row] = ptx::ex2_approx(own - top);
      if (rank == 0) {
        s_.top[row] = top;
        s_.total[row] = total;
      }
    }
    __syncthreads();
  }
  __device__ void merge() {
    const bool rotated = c_.coded_values.rotated();
    weigh_partials();
    if (rotated) {
      for (int i = thread_; i < p_.group * kDim; i += kCodedThreads) {
        const int row = i / kDim;
        float sum = 0;
#pragma unroll
        for (int rank = 0; rank < kMostTeam; ++rank) {
          if (rank >= team_) continue;
          sum += __ldcg(partial_of(rank, 1, row) + i % kDim) * s_.maximum[rank][row];
        }
        s_.query[row][i % kDim] = sum;
      }
      __syncthreads();
    }
    // 16 lanes have an output.
    const int each = (p_.group * kDim + team_ - 1) / team_;
    const int end = min((rank_ + 1) * each, p_.group * kDim);
#pragma unroll 1
    for (int first = rank_ * each; first < end; first += kCodedThreads / 16) {
      const int i = first + thread_ / 16, at = min(i, end - 1);
      const int row = at / kDim, dim = at % kDim, rank = thread_ % 16;
      float value = 0;
      if (rank < team_) value = __ldcg(partial_of(rank, 0, row) + dim) * s_.maximum[rank][row];
      for (int c = rank; rotated && c < kDim; c += 16) {
        value += __ldg(c_.rotation + dim * kDim + c) * s_.query[row][c];
      }
#pragma unroll
      for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
      if (i >= end || rank != 0) continue;
      const float total = s_.total[row];
      const int64_t to = int64_t{pair_} * p_.group + row;
      store_1(p_.q_dtype, c_.out, to * kDim + dim, total == 0 ? 0 : value / total);
      if (dim == 0) {
        c_.lse[to] = total == 0 ? -INFINITY : (s_.top[row] + log2f(total)) * 0.6931471805599453f;
      }
    }
  }

  __device__ void write_fault() const {
    if (c_.out == nullptr) {
      if (thread_ == 0) p_.lists.totals[pair_] = {0, 0, 1, 0};
      return;
    }
    const int64_t first = int64_t{pair_} * p_.group;
    for (int i = thread_; i < p_.group * kDim; i += kCodedThreads) {
      store_1(p_.q_dtype, c_.out, first * kDim + i, NAN);
    }
    if (thread_ < p_.group) c_.lse[first + thread_] = NAN;
  }

  __device__ void tell_fates() {
    for (uint32_t i = thread_; i < chunks_ * kChunkKeys; i += kCodedThreads) {
      uint8_t* to = c_.key_fates + int64_t{pair_} * p_.slots + this->slot_of(i);
      if (this->is_chosen(i)) *to = kFateChosen;
      if (this->is_guessed(i)) *to = kFateEstimated;
    }
    uint8_t* to = c_.cluster_fates + int64_t{pair_} * c_.total_clusters();
    uint32_t first = 0;
    for (int k = 0; k < p_.levels; ++k) {
      const uint32_t own = this->own_of(p_.level[k].clusters);
      for (uint32_t i = thread_; i < own; i += kCodedThreads) {
        to[this->cluster_at(i)] = this->fates_[first + i];
      }
      first += own;
      to += p_.level[k].clusters;
    }
    if (rank_ == 0 && thread_ == 0) p_.lists.totals[pair_] = {};
  }

  __device__ void tell_counters() const {
    if (thread_ != 0) return;
    if (head_ == 0 && rank_ == 0) atomicAdd(&p_.counters[0], 1ull);
    atomicAdd(&p_.counters[2], static_cast<unsigned long long>(s_.vectors));
    if (c_.everything) return;
    atomicAdd(&p_.counters[1], static_cast<unsigned long long>(chosen_));
    if (c_.key_codes.bits == 0) return;
    atomicAdd(&p_.counters[4], static_cast<unsigned long long>(s_.codes));
  }
};

}  // namespace sqz::cuda
