// Single keys: those of the chosen clusters, in chunks of up to 32 that the blocks of a team take
// in turn, so that each has its share of what the query is after. Codes give them logits; the best
// are read, and their own logits take the place of these.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/clusters.cuh"
#include "libruntime/kernels/cuda/decode_codes/products.cuh"

namespace sqz::cuda {

template <class Element, int kDim>
class CodedKeys : protected CodedClusters<Element, kDim> {
 protected:
  using Base = CodedClusters<Element, kDim>;
  using Base::Base;
  using Base::c_;
  using Base::first_;
  using Base::head_;
  using Base::lane_;
  using Base::p_;
  using Base::pair_;
  using Base::rank_;
  using Base::s_;
  using Base::stride_;
  using Base::team_;
  using Base::thread_;
  using Base::warp_;

  // This block's chunks. Place i of the keys' arrays: key i % 32 of chunk i / 32.
  __device__ void list_chunks() {
    const LookupLevel& level = finest();
    const uint32_t* offsets = level.offsets + int64_t{head_} * (level.clusters + 1);
    const uint32_t each = (level.clusters + kCodedThreads - 1) / kCodedThreads;
    const uint32_t begin = min(thread_ * each, static_cast<uint32_t>(level.clusters));
    const uint32_t end = min(begin + each, static_cast<uint32_t>(level.clusters));
    const auto is_chosen = [&](uint32_t j) { return this->fates_[first_ + j] == kFateChosen; };
    Sums own;
    for (uint32_t j = begin; j < end; ++j) {
      if (!is_chosen(j)) continue;
      const uint32_t size = offsets[j + 1] - offsets[j];
      own.a += (size + kChunkKeys - 1) / kChunkKeys;
      own.b += size;
    }
    uint32_t at = this->sums_before(own, all_).a;
    chunks_ = all_.a / team_ + (static_cast<uint32_t>(rank_) < all_.a % team_ ? 1 : 0);
    take_memory();
#pragma unroll 1
    for (uint32_t j = begin; j < end; ++j) {
      if (!is_chosen(j)) continue;
      const uint32_t size = offsets[j + 1] - offsets[j];
      const uint32_t count = (size + kChunkKeys - 1) / kChunkKeys;
      for (uint32_t i = (rank_ + team_ - at % team_) % team_; i < count; i += team_) {
        const uint32_t keys = min(size - i * kChunkKeys, static_cast<uint32_t>(kChunkKeys));
        info_[(at + i) / team_] = make_uint2(j << 5 | (keys - 1), offsets[j] + i * kChunkKeys);
      }
      at += count;
    }
    __syncthreads();
  }

  // False: a logit is NaN or infinite.
  __device__ bool choose_keys() {
    if (c_.everything || c_.key_codes.bits == 0) {
      for (uint32_t i = thread_; i < chunks_ * kChunkKeys; i += kCodedThreads) {
        scores_of_keys_[i] = i % kChunkKeys < keys_of(i / kChunkKeys) ? INFINITY : -INFINITY;
      }
      __syncthreads();
    } else {
      const bool sound = c_.key_codes.bits == 2 ? score_codes<2>() : score_codes<1>();
      if (!sound) return false;
      choose_best();
    }
    list_chosen();
    read_chosen();
    __syncthreads();
    return true;
  }

  __device__ void score_exact() {
    const uint2 slice = this->slice_of(c_.exact);
    const int64_t first = int64_t{head_} * c_.exact + slice.x;
    this->multiply_16(
        slice.y - slice.x, [&](uint32_t j) { return Base::row_16(c_.exact_keys, first + j); },
        [&](uint32_t j, int row, float x) { exact_logits_[j * stride_ + row] = x; });
  }

  __device__ const LookupLevel& finest() const {
    return p_.level[p_.levels - 1];
  }
  __device__ uint32_t keys_of(uint32_t chunk) const {
    return (info_[chunk].x & 31u) + 1;
  }
  __device__ uint32_t cluster_of(uint32_t chunk) const {
    return info_[chunk].x >> 5;
  }
  __device__ int64_t slot_of(uint32_t place) const {
    return int64_t{head_} * p_.slots + info_[place / kChunkKeys].y + place % kChunkKeys;
  }
  __device__ float& logit_at(uint32_t place, int row) const {
    return key_logits_[(place / kChunkKeys * stride_ + row) * kChunkKeys + place % kChunkKeys];
  }
  __device__ bool is_chosen(uint32_t place) const {
    return scores_of_keys_[place] == INFINITY;
  }
  __device__ bool is_guessed(uint32_t place) const {
    return scores_of_keys_[place] == 0;
  }
  __device__ static float scale_at(const void* scales, int64_t row) {
    return Element::low(__ldg(static_cast<const uint16_t*>(scales) + row));
  }

  Sums all_;                         // chunks and keys of the team
  uint32_t chunks_ = 0;              // of this block
  uint32_t chosen_ = 0;              // keys of this block that are read: in list_
  float* key_logits_ = nullptr;      // [chunks, stride, 32], later weights
  float* scores_of_keys_ = nullptr;  // [chunks, 32]; once chosen: infinity read, 0 guessed
  uint32_t* list_ = nullptr;         // [chunks * 32] places
  float* mean_weights_ = nullptr;    // [chunks, stride] of the cluster's mean value
  uint2* info_ = nullptr;            // [chunks] {cluster << 5 | keys - 1, first slot}
  float* exact_logits_ = nullptr;    // [exact keys of this block, stride]

 private:
  __device__ void take_memory() {
    const uint2 slice = this->slice_of(c_.exact);
    const int64_t words =
        chunks_ * coded_chunk_words(p_.group) + int64_t{slice.y - slice.x} * stride_;
    uint32_t* at = this->memory_;
    if (words > this->room_) {
      const int64_t of_pair = coded_key_words(p_.slots, finest().clusters, c_.exact, p_.group);
      const int64_t most = (all_.a / team_ + 1) * coded_chunk_words(p_.group);
      at = c_.workspace.keys + pair_ * of_pair + rank_ * most + int64_t{slice.x} * stride_;
    }
    const auto take = [&](int64_t count) {
      uint32_t* part = at;
      at += count;
      return part;
    };
    info_ = reinterpret_cast<uint2*>(take(2 * chunks_));
    key_logits_ = reinterpret_cast<float*>(take(int64_t{chunks_} * stride_ * kChunkKeys));
    scores_of_keys_ = reinterpret_cast<float*>(take(int64_t{chunks_} * kChunkKeys));
    list_ = take(int64_t{chunks_} * kChunkKeys);
    mean_weights_ = reinterpret_cast<float*>(take(int64_t{chunks_} * stride_));
    exact_logits_ = reinterpret_cast<float*>(at);
  }

  // What a warp has of a chunk.
  template <int kBits>
  struct Batch {
    KeyCodes<kDim, kBits> rows[kChunkKeys / 8];
    float scale, mean;  // of key `lane`; of query row lane / 4
    uint32_t keys;
  };

  template <int kBits>
  __device__ __forceinline__ void load_batch(uint32_t chunk, Batch<kBits>& to) const {
    const uint2 info = info_[chunk];
    const uint32_t last = info.x & 31u;
    const int64_t first = int64_t{head_} * p_.slots + info.y;
    const auto* codes = reinterpret_cast<const char*>(c_.key_codes.codes) +
                        first * KeyCodes<kDim, kBits>::kRowBytes;
#pragma unroll
    for (int t = 0; t < kChunkKeys / 8; ++t) {
      const uint32_t row = min(static_cast<uint32_t>(8 * t + lane_ / 4), last);
      to.rows[t].load(codes + row * KeyCodes<kDim, kBits>::kRowBytes, lane_);
    }
    to.scale = scale_at(c_.key_codes.scales, first + min(static_cast<uint32_t>(lane_), last));
    to.mean = lane_ / 4 < p_.group ? this->logit_of(first_, info.x >> 5, lane_ / 4) : 0;
    to.keys = last + 1;
  }

  // Logits of all keys by their codes, and s_.lse of them.
  template <int kBits>
  __device__ bool score_codes() {
    float maximum = kLowestLogit, sum = 0;
    Batch<kBits> now, next;
    uint32_t chunk = warp_;
    if (chunk < chunks_) load_batch(chunk, now);
#pragma unroll 1
    for (; chunk < chunks_; chunk += kCodedWarps) {
      load_batch(min(chunk + kCodedWarps, chunks_ - 1), next);
      float x[kChunkKeys / 8][2];
      multiply_parts(s_.code_parts, now.rows, lane_, x);
      float top = maximum;
#pragma unroll
      for (int i = 0; i < kChunkKeys / 4; ++i) {
        const int key = 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
        const float scale = __shfl_sync(~0u, now.scale, key);
        float& y = x[i / 2][i % 2];
        y = key < static_cast<int>(now.keys) ? now.mean + scale * y : -INFINITY;
        if (lane_ / 4 < p_.group) logit_at(chunk * kChunkKeys + key, lane_ / 4) = y;
        if (!(y <= top)) top = y;  // NaN stays
      }
      if (lane_ / 4 < p_.group) {
        sum *= exp2f(maximum - top);
        maximum = top;
#pragma unroll
        for (int i = 0; i < kChunkKeys / 4; ++i) sum += exp2f(x[i / 2][i % 2] - maximum);
      }
      now = next;
    }
    __syncwarp();
    return this->add_up(maximum, sum);
  }

  // As many as the clusters that the rule chose have.
  __device__ void choose_best() {
    const uint32_t count = chunks_ * kChunkKeys;
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kCodedThreads) {
      scores_of_keys_[i] = this->combined([&](int r) { return logit_at(i, r); });
    }
    const auto score = [&](uint32_t i) { return scores_of_keys_[i]; };
    const auto place = [&](uint32_t i) {
      return (i / kChunkKeys * team_ + rank_) * kChunkKeys + i % kChunkKeys;
    };
    const CodedBorder border = this->template find_border<true>(
        count, this->wanted_, score, [](uint32_t) { return 1u; }, place);
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kCodedThreads) {
      const bool is = border.chooses(score(i), place(i), 1, false);
      const bool is_key = i % kChunkKeys < keys_of(i / kChunkKeys);
      scores_of_keys_[i] = is ? INFINITY : is_key ? 0.0f : -INFINITY;
    }
    __syncthreads();
  }

  // In the order of warps, so that sums have one order.
  __device__ void list_chosen() {
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t chunk = warp_; chunk < chunks_; chunk += kCodedWarps) {
      count += __popc(__ballot_sync(~0u, is_chosen(chunk * kChunkKeys + lane_)));
    }
    Sums all;
    const uint32_t before = this->sums_before({lane_ == 0 ? count : 0, 0}, all).a;
    uint32_t at = __shfl_sync(~0u, before, 0);
    chosen_ = all.a;
#pragma unroll 1
    for (uint32_t chunk = warp_; chunk < chunks_; chunk += kCodedWarps) {
      const uint32_t place = chunk * kChunkKeys + lane_;
      const bool is = is_chosen(place);
      const uint32_t chosen = __ballot_sync(~0u, is);
      if (is) list_[at + __popc(chosen & ((1u << lane_) - 1))] = place;
      at += __popc(chosen);
    }
    __syncthreads();
  }

  // The logits of what is read, from its rows.
  __device__ void read_chosen() {
    if (c_.coded_keys.bits == 0) {
      this->multiply_16(
          chosen_, [&](uint32_t j) { return Base::row_16(c_.keys, slot_of(list_[j])); },
          [&](uint32_t j, int row, float x) { logit_at(list_[j], row) = x; });
      return;
    }
    const auto* codes = reinterpret_cast<const char*>(c_.coded_keys.codes);
    constexpr int kTiles = kDim > 128 ? 2 : 4;
#pragma unroll 1
    for (uint32_t tile = warp_ * 8 * kTiles; tile < chosen_; tile += kCodedWarps * 8 * kTiles) {
      Rows8<kDim> rows[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t j = min(tile + 8 * t + lane_ / 4, chosen_ - 1);
        rows[t].load(codes + slot_of(list_[j]) * kDim, lane_);
      }
      float scale[kTiles][2], mean[kTiles][2], x[kTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const uint32_t j = min(tile + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2, chosen_ - 1);
        scale[i / 2][i % 2] = scale_at(c_.coded_keys.scales, slot_of(list_[j]));
        mean[i / 2][i % 2] =
            lane_ / 4 < p_.group
                ? this->logit_of(first_, cluster_of(list_[j] / kChunkKeys), lane_ / 4)
                : 0;
      }
      multiply_parts(s_.row_parts, rows, lane_, x);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const uint32_t j = tile + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2;
        if (j >= chosen_ || lane_ / 4 >= p_.group) continue;
        logit_at(list_[j], lane_ / 4) = mean[i / 2][i % 2] + scale[i / 2][i % 2] * x[i / 2][i % 2];
      }
    }
  }
};

}  // namespace sqz::cuda
