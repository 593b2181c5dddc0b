// Single keys: those of this block's chosen clusters, in chunks of up to 32. Codes give them
// logits; the best of the team's are read, and their own logits take the place of these.
#pragma once

#include "libruntime/kernels/cuda/decode_codes/clusters.cuh"
#include "libruntime/kernels/cuda/decode_codes/products.cuh"

namespace sqz::cuda {

template <class Element, int kDim, int kRows>
class CodedKeys : protected CodedClusters<Element, kDim, kRows> {
 protected:
  using Base = CodedClusters<Element, kDim, kRows>;
  using Base::Base;
  using Base::c_;
  using Base::first_;
  using Base::head_;
  using Base::lane_;
  using Base::logits_;
  using Base::own_;
  using Base::p_;
  using Base::pair_;
  using Base::rank_;
  using Base::s_;
  using Base::team_;
  using Base::thread_;
  using Base::warp_;

  // Place i of the keys' arrays: key i % 32 of chunk i / 32.
  __device__ void list_chunks() {
    const LookupLevel& level = p_.level[p_.levels - 1];
    const uint32_t* offsets = level.offsets + int64_t{head_} * (level.clusters + 1);
    const uint32_t each = (own_ + kCodedThreads - 1) / kCodedThreads;
    const uint32_t begin = min(thread_ * each, own_), end = min(begin + each, own_);
    const auto chunks_of = [&](uint32_t i) {
      const bool is = this->fates_[first_ + i] == kFateChosen;
      return is ? (this->sizes_[first_ + i] + kChunkKeys - 1) / kChunkKeys : 0;
    };
    Sums own, all;
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) own.a += chunks_of(i);
    uint32_t at = this->sums_before(own, all).a;
    chunks_ = all.a;
    take_memory();
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t count = chunks_of(i), size = this->sizes_[first_ + i];
      if (count == 0) continue;
      const uint32_t slot = __ldg(offsets + this->cluster_at(i));
#pragma unroll 1
      for (uint32_t c = 0; c < count; ++c) {
        const uint32_t keys = min(size - c * kChunkKeys, uint32_t{kChunkKeys});
        info_[at++] = make_uint2((first_ + i) << 5 | (keys - 1), slot + c * kChunkKeys);
      }
    }
    __syncthreads();
  }

  // False: a logit is NaN or infinite.
  __device__ bool choose_keys() {
    if (c_.everything || c_.key_codes.bits == 0) {
#pragma unroll 1
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
    const int64_t first = int64_t{head_} * c_.exact;
    this->multiply_16(
        this->own_of(c_.exact),
        [&](uint32_t j) { return Base::row_16(c_.exact_keys, first + this->cluster_at(j)); },
        [&](uint32_t at, const float(&x)[Base::kProducts]) {
#pragma unroll
          for (int i = 0; i < Base::kProducts; ++i) {
            const uint32_t j = at + Base::row_of_product(i);
            if (j < this->own_of(c_.exact)) exact_logits_[j * kRows + lane_ / 4] = x[i];
          }
        });
  }

  __device__ uint32_t keys_of(uint32_t chunk) const {
    return (info_[chunk].x & 31u) + 1;
  }
  // Among this block's clusters.
  __device__ uint32_t cluster_of(uint32_t chunk) const {
    return info_[chunk].x >> 5;
  }
  __device__ uint32_t slot_of(uint32_t place) const {
    return info_[place / kChunkKeys].y + place % kChunkKeys;
  }
  __device__ int64_t row_of(uint32_t place) const {
    return int64_t{head_} * p_.slots + slot_of(place);
  }
  __device__ float& logit_at(uint32_t place, int row) const {
    return key_logits_[(place / kChunkKeys * kRows + row) * kChunkKeys + place % kChunkKeys];
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

  uint32_t chunks_ = 0;
  uint32_t chosen_ = 0;              // keys that are read: in list_
  float* key_logits_ = nullptr;      // [chunks, kRows, 32], later weights
  float* scores_of_keys_ = nullptr;  // [chunks, 32]; once chosen: infinity read, 0 guessed
  uint32_t* list_ = nullptr;         // [chunks * 32] places
  float* mean_weights_ = nullptr;    // [chunks, kRows] of their cluster's mean value
  uint2* info_ = nullptr;            // [chunks] {this block's cluster << 5 | keys - 1, first slot}
  float* exact_logits_ = nullptr;    // [this block's exact keys, kRows]

 private:
  __device__ void take_memory() {
    const int64_t words =
        (chunks_ * coded_chunk_words(p_.group) + int64_t{this->own_of(c_.exact)} * kRows + 3) / 4 *
        4;
    uint32_t* at = this->memory_;
    if (words > this->room_) {
      if (thread_ == 0) s_.memory = atomicAdd(&this->space_.words, static_cast<uint32_t>(words));
      __syncthreads();
      const int64_t of_pair =
          coded_key_words(p_.slots, p_.level[p_.levels - 1].clusters, c_.exact, p_.group);
      at = c_.workspace.keys + pair_ * of_pair + s_.memory;
    }
    const auto take = [&](int64_t count) {
      uint32_t* part = at;
      at += count;
      return part;
    };
    info_ = reinterpret_cast<uint2*>(take(2 * chunks_));
    key_logits_ = reinterpret_cast<float*>(take(int64_t{chunks_} * kRows * kChunkKeys));
    scores_of_keys_ = reinterpret_cast<float*>(take(int64_t{chunks_} * kChunkKeys));
    list_ = take(int64_t{chunks_} * kChunkKeys);
    mean_weights_ = reinterpret_cast<float*>(take(int64_t{chunks_} * kRows));
    exact_logits_ = reinterpret_cast<float*>(at);
  }

  // What a lane has of a chunk.
  template <int kBits>
  struct Chunk {
    KeyCodes<kDim, kBits> rows[kChunkKeys / 8];
    float scale;  // of key `lane`
  };

  template <int kBits>
  __device__ __forceinline__ void load_chunk(uint32_t chunk, Chunk<kBits>& to) const {
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
  }

  // Logits of all keys by their codes, and s_.lse of them. The loads of kAhead chunks are under
  // way.
  template <int kBits>
  __device__ bool score_codes() {
    constexpr int kAhead = kDim > 128 ? 2 : 4;
    float maximum = kLowestLogit, sum = 0;
    Chunk<kBits> loaded[kAhead];
    uint32_t chunk = warp_, next = warp_;
    const auto load_next = [&](Chunk<kBits>& to) {
      if (next < chunks_) load_chunk(next, to);
      next += kCodedWarps;
    };
#pragma unroll
    for (Chunk<kBits>& to : loaded) load_next(to);
#pragma unroll 1
    for (; chunk < chunks_; chunk += kCodedWarps) {
      const Chunk<kBits> now = loaded[0];
#pragma unroll
      for (int a = 0; a + 1 < kAhead; ++a) loaded[a] = loaded[a + 1];
      load_next(loaded[kAhead - 1]);
      score_chunk(chunk, now, maximum, sum);
    }
    __syncwarp();
    return this->add_up(maximum, sum);
  }

  template <int kBits>
  __device__ __forceinline__ void score_chunk(uint32_t chunk, const Chunk<kBits>& loaded,
                                              float& maximum, float& sum) const {
    constexpr int kOwn = kChunkKeys / 4;  // keys of a lane
    float x[kChunkKeys / 8][2], y[kOwn];
    multiply_parts(s_.code_parts, loaded.rows, lane_, x);
    const int row = lane_ / 4, keys = keys_of(chunk), first = 2 * (lane_ % 4);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      y[i] = x[i / 2][i % 2] * __shfl_sync(~0u, loaded.scale, first + 8 * (i / 2) + i % 2);
    }
    if (row >= p_.group) return;
    const float mean = logits_[cluster_of(chunk) * kRows + row];
    float* to = key_logits_ + (chunk * kRows + row) * kChunkKeys + first;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = 8 * (i / 2) + i % 2;
      y[i] = first + key < keys ? mean + y[i] : -INFINITY;
      to[key] = y[i];
    }
    this->add_exponentials(y, maximum, sum);
  }

  // As many as the clusters that the rule chose have.
  __device__ void choose_best() {
    const uint32_t count = chunks_ * kChunkKeys;
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kCodedThreads) {
      scores_of_keys_[i] = this->combined([&](int r) { return logit_at(i, r); });
    }
    const auto score = [&](uint32_t i) { return scores_of_keys_[i]; };
    const auto size = [](uint32_t) { return 1u; };
    const auto bins = this->add_bins(
        count, [&](uint32_t i) { return CodedCutoff::first_bin(score(i)); }, size);
    CodedCutoff cutoffs[1] = {{true, this->wanted_, false}};
    this->find(cutoffs, bins, count, score, size, [&](uint32_t i) { return slot_of(i); });
#pragma unroll 1
    for (uint32_t i = thread_; i < count; i += kCodedThreads) {
      const bool is = cutoffs[0].chooses(score(i), slot_of(i));
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
          chosen_, [&](uint32_t j) { return Base::row_16(c_.keys, row_of(list_[j])); },
          [&](uint32_t at, const float(&x)[Base::kProducts]) {
#pragma unroll
            for (int i = 0; i < Base::kProducts; ++i) {
              const uint32_t j = at + Base::row_of_product(i);
              if (j < chosen_) logit_at(list_[j], lane_ / 4) = x[i];
            }
          });
      return;
    }
    const auto* codes = reinterpret_cast<const char*>(c_.coded_keys.codes);
    constexpr int kTiles = 2;
#pragma unroll 1
    for (uint32_t tile = warp_ * 8 * kTiles; tile < chosen_; tile += kCodedWarps * 8 * kTiles) {
      Rows8<kDim> rows[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t j = min(tile + 8 * t + lane_ / 4, chosen_ - 1);
        rows[t].load(codes + row_of(list_[j]) * kDim, lane_);
      }
      float scale[kTiles][2], mean[kTiles][2], x[kTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const uint32_t j = min(tile + 8 * (i / 2) + 2 * (lane_ % 4) + i % 2, chosen_ - 1);
        scale[i / 2][i % 2] = scale_at(c_.coded_keys.scales, row_of(list_[j]));
        mean[i / 2][i % 2] = lane_ / 4 < p_.group
                                 ? logits_[cluster_of(list_[j] / kChunkKeys) * kRows + lane_ / 4]
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
