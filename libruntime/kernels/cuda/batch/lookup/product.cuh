// Logits of a block's clusters, 16 of a warp. Query heads of all requests are the M side of an mma,
// from shared memory; centroids go from memory straight to registers as its N side, in the order of
// common/rows.cuh.
//
// A warp has 64 rows of queries, a group: row (v, n) with v = 0 ... 7 is lane 4 n + t's, for each
// t. With H rows a request, a power of two up to 8, it is head v % H of the group's request v / H *
// 8 + n: one lane has all heads of its requests. With 16 it is head v + n % 2 * 8 of request n / 2.
#pragma once

#include "libruntime/kernels/cuda/batch/lookup/list.cuh"
#include "libruntime/kernels/cuda/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"

namespace sqz::cuda {

inline constexpr int kBatchOwn = kBatchGroup / 8;     // rows of a lane
inline constexpr int kBatchTiles = kBatchGroup / 16;  // of 16 rows: v = 2 j and 2 j + 1
inline constexpr int kBatchGroups = kBatchRows / kBatchGroup;

template <int kDim>
struct BatchShared {
  QueryRows<kDim> queries[kBatchGroups][kBatchTiles];
  BatchList::Shared scan;
};

template <class Element, int kDim>
class BatchProduct : protected BatchList {
 protected:
  // A warp's 16 clusters, of which 4 are this lane's: 8 i + 2 t + e. Sizes and words are as they
  // were loaded, and used as late as may be, through log_size() and word().
  struct Tile {
    RowPart<kDim> rows[2];
    float log_sizes[2][2];
    uint32_t words[2][2];
  };
  // The logit of row v and cluster (i, e): d[v / 2][i][v % 2 * 2 + e].
  using Logits = float[kBatchTiles][2][4];

  __device__ BatchProduct(const BatchLookup& call, int level, BatchShared<kDim>& shared)
      : BatchList(call, level, shared.scan),
        halves_(p_.group > 8 ? 1 : 0),
        log_heads_(batch_log_rows(p_.group) - halves_),
        rows_(((requests_ << halves_) + 7) / 8 << log_heads_),
        groups_((rows_ + kBatchOwn - 1) / kBatchOwn),
        group_(warp_ % groups_),
        few_(rows_ <= kBatchOwn / 2),
        queries_(shared.queries) {}

  // log2 of a cluster's size, -infinity if it is empty or beyond the part, and the requests that it
  // is alive for, in a tile that begins with cluster `first`.
  __device__ float log_size(const Tile& tile, int first, int i, int e) const {
    const float size = tile.log_sizes[i][e] * 1.4426950408889634f;
    return cluster_of(first, i, e) < end_ ? size : -INFINITY;
  }
  __device__ uint32_t word(const Tile& tile, int first, int i, int e) const {
    return cluster_of(first, i, e) < end_ ? tile.words[i][e] : 0;
  }

  // The request and the head of row (v, n) of a group.
  __device__ int request_of(int group, int v, int n) const {
    return ((group * (kBatchOwn >> log_heads_) + (v >> log_heads_)) * 8 + n) >> halves_;
  }
  __device__ int head_of(int v, int n) const {
    return (v & ((1 << log_heads_) - 1)) + 8 * (n & halves_);
  }
  __device__ bool has(int group, int v, int n) const {
    return request_of(group, v, n) < requests_ && head_of(v, n) < p_.group;
  }
  // A cluster of this lane, in a tile that begins with cluster `tile`.
  __device__ int cluster_of(int tile, int i, int e) const {
    return tile + 8 * i + 2 * (lane_ % 4) + e;
  }

  // Returns a bit for each request of which this thread loads a query beyond kMostQuery.
  __device__ uint32_t load_queries() {
    uint32_t beyond = 0;
    constexpr int kChunks = kDim / 32;
    const int n = lane_ / 4, t = lane_ % 4;
#pragma unroll 2
    for (int item = warp_; item < groups_ * kBatchTiles * kChunks; item += kBatchWarps) {
      const int tile = item / kChunks, c = item % kChunks;
      const int group = tile / kBatchTiles, j = tile % kBatchTiles;
      uint4 words[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v = 2 * j + half;
        words[half] = make_uint4(0, 0, 0, 0);
        if (!has(group, v, n)) continue;
        const int64_t row = pair_of(request_of(group, v, n)) * p_.group + head_of(v, n);
        // Not through the read-only path: kernels that ran beside this one wrote them.
        words[half] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p_.q) +
                                                      row * kDim + 32 * c + 8 * t);
        if (is_beyond<Element>(larger(0, words[half]), p_.scale)) {
          beyond |= 1u << request_of(group, v, n);
        }
      }
      uint4* to = queries_[group][j].words + 2 * c * 32 + lane_;
      to[0] = make_uint4(words[0].x, words[1].x, words[0].y, words[1].y);
      to[32] = make_uint4(words[0].z, words[1].z, words[0].w, words[1].w);
    }
    __syncthreads();
    return beyond;
  }

  // The warp's first tile.
  __device__ void load_first(Tile& to) const {
    if (first_tile() >= end_) return;
    load_rows(first_tile(), to);
    load_sizes(first_tile(), to);
  }

  // Calls body(its first cluster, logits without scale) for the warp's tiles; unless kAll not for
  // those that nobody is alive for, but skipped(its first cluster). `tile`: the first one.
  template <bool kAll, class Body, class Skipped>
  __device__ __forceinline__ void for_tiles(Tile& tile, const Body& body,
                                            const Skipped& skipped) const {
    const int stride = kBatchWarps / groups_ * kBatchTile;
#pragma unroll 1
    for (int at = first_tile(); at < end_; at += stride) {
      Logits d = {};
      if (few_) {
        multiply<kBatchTiles / 2>(tile, d);
      } else {
        multiply<kBatchTiles>(tile, d);
      }
      if (at + stride < end_) load_rows(at + stride, tile);  // on their way meanwhile
      const uint32_t words =
          word(tile, at, 0, 0) | word(tile, at, 0, 1) | word(tile, at, 1, 0) | word(tile, at, 1, 1);
      if (kAll || __any_sync(~0u, words != 0)) {
        body(at, d);
      } else {
        skipped(at);
      }
      if (at + stride < end_) load_sizes(at + stride, tile);
    }
  }

  const int halves_;     // 1: two lanes have the rows of a request, 0: one
  const int log_heads_;  // of a lane's rows of a request
  const int rows_;       // of a lane, in all groups
  const int groups_;     // the warps of one share the tiles between them
  const int group_;      // of this warp
  const bool few_;       // half a group of rows is enough

 private:
  __device__ int first_tile() const {
    return begin_ + warp_ / groups_ * kBatchTile;
  }

  // Two warps read the same rows where there are two groups.
  __device__ __forceinline__ void load_rows(int tile, Tile& to) const {
    const int64_t first = static_cast<int64_t>(head_) * level_.clusters;
    const auto* rows = static_cast<const char*>(level_.centroids) + first * kDim * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(tile + 8 * i + lane_ / 4, end_ - 1);
      to.rows[i].load_kept(rows + static_cast<int64_t>(row) * kDim * 2, lane_);
    }
  }
  __device__ __forceinline__ void load_sizes(int tile, Tile& to) const {
    const int64_t first = static_cast<int64_t>(head_) * level_.clusters;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int cluster = min(cluster_of(tile, i, e), end_ - 1);
        to.log_sizes[i][e] = __ldg(level_.log_sizes + first + cluster);
        to.words[i][e] = k_ == 0 ? all_ : __ldcg(alive_words(k_) + cluster);
      }
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void multiply(const Tile& tile, Logits& d) const {
    const QueryRows<kDim>* queries = queries_[group_];
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint4 words = queries[j].words[k * 32 + lane_];
        const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4& row = tile.rows[i].words[k / 2];
          Element::mma(d[j][i], a, k % 2 == 0 ? row.x : row.z, k % 2 == 0 ? row.y : row.w);
        }
      }
    }
  }

  QueryRows<kDim> (&queries_)[kBatchGroups][kBatchTiles];
};

}  // namespace sqz::cuda
