// The kernel: queries in the forms that products take, clusters, keys, and then their values. A
// block adds up what its own keys, exact keys and estimated clusters are worth; the team merges.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/keys.cuh"
#include "libruntime/kernels/cuda/ptx/ex2.cuh"
#include "libruntime/kernels/cuda/ptx/prefetch.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows>
class DecodeCodes : private CodedKeys<Element, kDim, kRows> {
 public:
  using Base = CodedKeys<Element, kDim, kRows>;
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
  using Base::team_;
  using Base::thread_;
  using Base::warp_;
  static constexpr int kPartial = kDim + 2;  // floats of a partial's row

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
#pragma unroll 1
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
#pragma unroll
      for (int u = 0; u < kDim / 16; ++u) {
        const int i = 16 * u + thread_ % 16;
        if (is) sum += s_.query[row][i] * __ldg(c_.rotation + i * kDim + dim);
      }
#pragma unroll
      for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (is && thread_ % 16 == 0) turned[row * kDim + dim] = sum;
    }
  }
  // Once the team has turned its parts. s_.query is not needed any more.
  __device__ void finish_turned() {
    const float* turned = c_.workspace.turned + int64_t{pair_} * kMostGroup * kDim;
#pragma unroll 1
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
    float rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = kLowestLogit;
    const auto raise = [&](const auto& logit) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < p_.group) rows[r] = fmaxf(rows[r], logit(r));
      }
    };
#pragma unroll 1
    for (uint32_t i = thread_; i < keys; i += kCodedThreads) {
      if (counts(i)) raise([&](int r) { return this->logit_at(i, r); });
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < exact_keys(); i += kCodedThreads) {
      raise([&](int r) { return this->exact_logits_[i * kRows + r]; });
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < clusters(); i += kCodedThreads) {
      if (!is_estimated(i)) continue;
      const float size = log2f(static_cast<float>(this->sizes_[i]));
      raise([&](int r) { return logits_[i * kRows + r] + size; });
    }
    reduce_rows(rows, s_.top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = 0;
      // A warp has a chunk.
#pragma unroll 1
    for (uint32_t i = thread_; i < keys; i += kCodedThreads) {
      const bool has_mean = c_.coded_values.bits > 0 || !this->is_chosen(i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= p_.group) continue;
        float& logit = this->logit_at(i, r);
        const float weight = counts(i) ? ptx::ex2_approx(logit - s_.top[r]) : 0;
        logit = weight;
        rows[r] += weight;
        float mean = has_mean ? weight : 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) mean += __shfl_xor_sync(~0u, mean, step);
        if (lane_ == 0) this->mean_weights_[i / kChunkKeys * kRows + r] = mean;
      }
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < exact_keys(); i += kCodedThreads) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= p_.group) continue;
        float& logit = this->exact_logits_[i * kRows + r];
        logit = ptx::ex2_approx(logit - s_.top[r]);
        rows[r] += logit;
      }
    }
#pragma unroll 1
    for (uint32_t i = thread_; i < clusters(); i += kCodedThreads) {
      if (!is_estimated(i)) continue;
      const float size = log2f(static_cast<float>(this->sizes_[i]));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= p_.group) continue;
        float& logit = logits_[i * kRows + r];
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
      for (int r = 0; r < kRows; ++r) {
        if (r >= p_.group) continue;
        float weight = 0;
#pragma unroll 1
        for (uint32_t c = i; c < chunks_ && this->cluster_of(c) == cluster; ++c) {
          weight += this->mean_weights_[c * kRows + r];
        }
        logits_[cluster * kRows + r] = weight;
      }
    }
    __syncthreads();
  }

  __device__ bool counts(uint32_t place) const {
    return this->is_chosen(place) || (c_.estimate && this->is_guessed(place));
  }

  // Of all threads of the block, in one order.
  template <class Join>
  __device__ void reduce_rows(const float (&rows)[kRows], float (&to)[kMostGroup],
                              const Join& join) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = rows[r];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
      if (lane_ == 0) s_.maximum[warp_][r] = x;
    }
    __syncthreads();
    // Thread 16 row + warp.
    if (thread_ < kRows * kCodedWarps) {
      float x = s_.maximum[thread_ % kCodedWarps][thread_ / kCodedWarps];
#pragma unroll
      for (int step = kCodedWarps / 2; step > 0; step /= 2) {
        x = join(x, __shfl_xor_sync(~0u, x, step));
      }
      if (thread_ % kCodedWarps == 0) to[thread_ / kCodedWarps] = x;
    }
    __syncthreads();
  }

  // ---- Values.

  // A warp has kSubs rows at once, each by kDim / 8 lanes: eight dimensions a lane.
  static constexpr int kSubs = 32 / (kDim / 8);
  struct Sum {
    float rows[kRows][8];
  };
  __device__ int column() const {
    return lane_ % (kDim / 8);
  }

  // Adds scale(j) weight(j, r) times the row load(j), of this lane's raw numbers, for the block's j
  // below count, with the loads of kAhead rows under way.
  template <class Load, class Floats, class Scale, class Weight>
  __device__ __forceinline__ void add_rows(uint32_t count, const Load& load, const Floats& floats,
                                           const Scale& scale, const Weight& weight,
                                           Sum& sum) const {
    constexpr int kAhead = 4;
    constexpr uint32_t kStep = kCodedWarps * kSubs;
    const uint32_t sub = lane_ / (kDim / 8);  // kSubs: a lane that has no row
#pragma unroll 1
    for (uint32_t first = warp_ * kSubs; first < count; first += kAhead * kStep) {
      decltype(load(0)) raw[kAhead];
      float scales[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const uint32_t j = min(first + a * kStep + sub, count - 1);
        raw[a] = load(j);
        scales[a] = scale(j);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const uint32_t j = min(first + a * kStep + sub, count - 1);
        const bool is = j == first + a * kStep + sub && sub < kSubs;
        float x[8];
        floats(raw[a], x);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float w = is && r < p_.group ? scales[a] * weight(j, r) : 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) sum.rows[r][i] += w * x[i];
        }
      }
    }
  }

  // Rows of 16 bits in memory: every team-th, or those of the keys in list_, and their weights.
  struct Rows16 {
    uint32_t count;
    const char* rows;
    const float* weights;  // [count, kRows], or null: of list_
    const uint8_t*
        fates;  // [count] CodedFate, of which those from `least` to `most` count; or null
    uint8_t least, most;
  };

  __device__ __forceinline__ void add_rows_16(const Rows16& rows, Sum& sum) const {
    add_rows(
        rows.count,
        [&](uint32_t j) {
          if (rows.fates != nullptr && (rows.fates[j] < rows.least || rows.fates[j] > rows.most)) {
            return make_uint4(0, 0, 0, 0);
          }
          const uint32_t row =
              rows.weights == nullptr ? this->slot_of(list_[j]) : this->cluster_at(j);
          return __ldg(reinterpret_cast<const uint4*>(Base::row_16(rows.rows, row)) + column());
        },
        [](const uint4& raw, float(&x)[8]) {
          const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[2 * i] = Element::low(words[i]);
            x[2 * i + 1] = Element::high(words[i]);
          }
        },
        [](uint32_t) { return 1.0f; },
        [&](uint32_t j, int r) {
          return rows.weights == nullptr ? this->logit_at(list_[j], r)
                                         : rows.weights[j * kRows + r];
        },
        sum);
  }

  // Values of the keys that are read, unless they are codes; exact ones; and mean values.
  __device__ Rows16 rows_16(int which) const {
    if (which == 0) {
      const bool codes = c_.coded_values.bits > 0;
      return {codes ? 0 : chosen_,
              codes ? nullptr : Base::row_16(c_.values, int64_t{head_} * p_.slots),
              nullptr,
              nullptr,
              0,
              0};
    }
    if (which == 1) {
      return {exact_keys(),
              Base::row_16(c_.exact_values, int64_t{head_} * c_.exact),
              this->exact_logits_,
              nullptr,
              0,
              0};
    }
    uint32_t first = 0;
#pragma unroll 1
    for (int k = 0; k < which - 2; ++k) first += this->own_of(p_.level[k].clusters);
    const int64_t clusters = p_.level[which - 2].clusters;
    return {this->own_of(clusters),
            Base::row_16(c_.value_means[which - 2], head_ * clusters),
            logits_ + first * kRows,
            this->fates_ + first,
            c_.estimate ? kFateEstimated : kFateChosen,
            which - 1 == p_.levels ? kFateChosen : kFateEstimated};
  }

  __device__ void add_values() {
    Sum sum = {};
    if (c_.coded_values.bits > 0) add_codes(sum);
    if (c_.coded_values.rotated()) {
      leave(1, sum);
      sum = {};
    }
#pragma unroll 1
    for (int which = 0; which < p_.levels + 2; ++which) add_rows_16(rows_16(which), sum);
    leave(0, sum);
  }

  // What the rows of codes add to their means, rotated or not.
  __device__ void add_codes(Sum& sum) const {
    const bool bytes = c_.coded_values.bits == 8;
    const auto* codes = reinterpret_cast<const char*>(c_.coded_values.codes) +
                        int64_t{head_} * p_.slots * (bytes ? kDim : kDim / 2);
    const auto* scales =
        static_cast<const uint16_t*>(c_.coded_values.scales) + int64_t{head_} * p_.slots;
    const auto scale = [&](uint32_t j) { return Base::scale_at(scales, this->slot_of(list_[j])); };
    const auto weight = [&](uint32_t j, int r) { return this->logit_at(list_[j], r); };
    if (bytes) {
      add_rows(
          chosen_,
          [&](uint32_t j) {
            const char* row = codes + int64_t{this->slot_of(list_[j])} * kDim;
            return __ldg(reinterpret_cast<const uint2*>(row) + column());
          },
          [](const uint2& raw, float(&x)[8]) {
            const uint32_t words[2] = {raw.x ^ 0x80808080u, raw.y ^ 0x80808080u};
#pragma unroll
            for (int i = 0; i < 8; ++i) {  // 2^23 + a byte as a float
              x[i] = __uint_as_float(__byte_perm(words[i / 4], 0x4B000000u, 0x7440 + i % 4)) -
                     8388736.0f;
            }
          },
          scale, weight, sum);
      return;
    }
    // 4 bits: the lower half of the dimensions in the lower halves of the bytes.
    constexpr int kHalf = kDim / 16;
    add_rows(
        chosen_,
        [&](uint32_t j) {
          const char* row = codes + int64_t{this->slot_of(list_[j])} * (kDim / 2);
          return __ldg(reinterpret_cast<const uint2*>(row) + column() % kHalf);
        },
        [&](const uint2& raw, float(&x)[8]) {
          const int shift = column() < kHalf ? 0 : 4;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            x[i] = s_.levels4[(i < 4 ? raw.x : raw.y) >> (8 * (i % 4) + shift) & 15];
          }
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
    const int sub = lane_ / (kDim / 8);
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      if (first >= p_.group) break;
      __syncthreads();
#pragma unroll
      for (int r = first; r < first + kAtOnce; ++r) {
        if (sub == kSubs) continue;
        auto* to =
            reinterpret_cast<float4*>(&s_.rows[r - first][warp_ * kSubs + sub][8 * column()]);
        to[0] = make_float4(sum.rows[r][0], sum.rows[r][1], sum.rows[r][2], sum.rows[r][3]);
        to[1] = make_float4(sum.rows[r][4], sum.rows[r][5], sum.rows[r][6], sum.rows[r][7]);
      }
      __syncthreads();
      const int row = first + thread_ / kDim;
      if (thread_ >= kAtOnce * kDim || row >= p_.group) continue;
      float x = 0;
#pragma unroll
      for (int w = 0; w < kCodedWarps * kSubs; ++w) x += s_.rows[row - first][w][thread_ % kDim];
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
      this->add_sums_of_16(top, total);
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
#pragma unroll 1
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
#pragma unroll 1
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
#pragma unroll 1
    for (int i = thread_; i < p_.group * kDim; i += kCodedThreads) {
      store_1(p_.q_dtype, c_.out, first * kDim + i, NAN);
    }
    if (thread_ < p_.group) c_.lse[first + thread_] = NAN;
  }

  __device__ void tell_fates() {
#pragma unroll 1
    for (uint32_t i = thread_; i < chunks_ * kChunkKeys; i += kCodedThreads) {
      uint8_t* to = c_.key_fates + int64_t{pair_} * p_.slots + this->slot_of(i);
      if (this->is_chosen(i)) *to = kFateChosen;
      if (this->is_guessed(i)) *to = kFateEstimated;
    }
    uint8_t* to = c_.cluster_fates + int64_t{pair_} * c_.total_clusters();
    uint32_t first = 0;
#pragma unroll 1
    for (int k = 0; k < p_.levels; ++k) {
      const uint32_t own = this->own_of(p_.level[k].clusters);
#pragma unroll 1
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
