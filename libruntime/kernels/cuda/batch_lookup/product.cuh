// Products of a list's query rows, which stay in shared memory, with tiles of centroids that stream
// past; a warp has 16 rows.
#pragma once

#include "libruntime/kernels/cuda/batch_lookup/emit.cuh"
#include "libruntime/kernels/cuda/plain/tiles.cuh"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

template <class Element, int kDim>
class BatchProduct {
  using Tile = PlainTile<kDim>;

 public:
  static constexpr int kClusters = Tile::kStream;  // of a tile
  static constexpr int kTiles = kClusters / 8;
  // Of a multiprocessor: as many as have room for 128 rows.
  static constexpr int kBlocks = kDim == 256 ? 2 : 3;

  static constexpr int64_t shared_bytes(int rows) {
    return int64_t{rows + 2 * kClusters} * Tile::kStride * 2;
  }

  // Clusters [begin, end) of level k. The first tile is on its way at once: no kernel writes it.
  __device__ BatchProduct(const BatchLookup& call, const BatchList& own, int k, int begin, int end,
                          uint16_t* memory)
      : call_(call),
        own_(own),
        from_(static_cast<const char*>(call.lookup.level[k].centroids) +
              int64_t{own.head} * call.lookup.level[k].clusters * kDim * 2),
        begin_(begin),
        end_(end),
        tiles_(memory),
        rows_(memory + 2 * kClusters * Tile::kStride) {
    fetch(begin);
  }

  __device__ void load_queries() const {
    const auto* q = static_cast<const uint16_t*>(call_.lookup.q);
    const int items = (own_.rows + 15) / 16 * 16 * Tile::kChunks;
#pragma unroll 4
    for (int i = threadIdx.x; i < items; i += blockDim.x) {
      const int r = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const int64_t query = own_.query(call_, r);
      ptx::cp_async_16(ptx::shared_address(rows_ + r * Tile::kStride + chunk * 8),
                       q + max(query, int64_t{0}) * kDim + chunk * 8, query < 0 ? 0 : 16);
    }
    ptx::cp_async_commit_group();
  }

  // begin(tile) of all threads, then take(tile, logits) of the warps that have rows: lane 4 g + t
  // has rows g (logits[.][0, 1]) and g + 8 (logits[.][2, 3]) of its warp's and clusters
  // tile + 8 i + 2 t and the next. Ends with a barrier, as every tile.
  template <class Begin, class Take>
  __device__ void run(const Begin& begin, const Take& take) const {
    const int first = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll 1
    for (int tile = begin_; tile < end_; tile += kClusters) {
      fetch(tile + kClusters);
      begin(tile);
      ptx::cp_async_wait_group<1>();  // all but the next tile
      __syncthreads();
      if (first < own_.rows) {
        float logits[kTiles][4] = {};
        add_product<Element, kDim, kTiles>(rows_ + first * Tile::kStride, place_of(tile), logits);
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i) logits[i / 4][i % 4] *= call_.lookup.scale;
        take(tile, logits);
      }
      __syncthreads();  // the tile has been read
    }
  }

 private:
  __device__ uint16_t* place_of(int tile) const {
    return tiles_ + (tile - begin_) / kClusters % 2 * kClusters * Tile::kStride;
  }
  // A group of copies in any case.
  __device__ void fetch(int tile) const {
    if (tile < end_) {
      fetch_rows<kDim, kClusters>(
          [&](int r) { return from_ + int64_t{min(tile + r, end_ - 1)} * kDim * 2; },
          place_of(tile));
    }
    ptx::cp_async_commit_group();
  }

  const BatchLookup& call_;
  const BatchList& own_;
  const char* const from_;
  const int begin_, end_;
  uint16_t *const tiles_, *const rows_;
};

}  // namespace sqz::cuda
