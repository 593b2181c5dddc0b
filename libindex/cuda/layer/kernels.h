// Turns the result of k-means into the data of an index, beside kmeans.h: rows in another
// type, sizes of clusters of clusters, the order of clusters in the file. Device pointers and a
// stream, no allocation, no waiting.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/dtype.h"
#include "formats/base/status.h"

namespace sqz::cuda {

// out[b, i, :] = rows[b, first + i, :] rounded to `out_type`, components from `dim` to `out_dim`
// zero.
struct PackParams {
  int32_t heads = 0, tokens = 0, dim = 0;  // B, N, d
  int64_t head_stride = 0;                 // elements of `rows` from head to head
  const void* rows = nullptr;              // [B, N, d]
  DType type = DType::kF32;                // of rows: F32, BF16 or F16
  int32_t first = 0, count = 0;
  DType out_type = DType::kBF16;  // or F16
  int32_t out_dim = 0;            // d or more
  void* out = nullptr;            // [B, count, out_dim]; may be null if count = 0
  // [1], all ones before: the lowest b N d + t d + c of an element of all of `rows`, copied or not,
  // that is NaN, infinite or beyond out_type. Null: not looked for.
  uint64_t* bad = nullptr;
};
Status pack_rows(const PackParams& params, cudaStream_t stream);

// weights[b, c] = keys below cluster c: the sum of child_weights over its children, each 1 if that
// is null.
struct WeightParams {
  int32_t heads = 0, children = 0, clusters = 0;
  const uint32_t* child_weights = nullptr;  // [B, children] or null
  const uint32_t* order = nullptr;          // [B, children]
  const uint32_t* offsets = nullptr;        // [B, clusters + 1]
  uint32_t* weights = nullptr;              // [B, clusters]
};
Status cluster_weights(const WeightParams& params, cudaStream_t stream);

// Orders clusters for the file (libindex/order.h): groups of siblings one after another, and in
// each a greedy chain, next the one most similar by cosine to the last, across groups too.
// The very first is the first of its group; the earlier in `list` wins ties.
struct ChainParams {
  int32_t heads = 0, clusters = 0, groups = 0, dim = 0;  // dim: a multiple of 8, up to 256
  const void* means = nullptr;                           // [B, clusters, dim] bf16
  const uint32_t* list = nullptr;       // [B, clusters]: clusters by group; null: 0, 1, 2, ...
  const uint32_t* groups_at = nullptr;  // [B, groups + 1]: first place in `list`; null: one group
  float* inverse_norms = nullptr;       // [B, clusters] scratch
  uint32_t* order = nullptr;            // [B, clusters]
};
Status chain_clusters(const ChainParams& params, cudaStream_t stream);

// slots[b, i] = child_slots[b, offsets[b, i]]: the first slot below a cluster, from the first slots
// of the level below.
struct SlotParams {
  int32_t heads = 0, clusters = 0, children = 0;
  const uint32_t* offsets = nullptr;      // [B, clusters + 1]
  const uint32_t* child_slots = nullptr;  // [B, children + 1]
  uint32_t* slots = nullptr;              // [B, clusters + 1]
};
Status compose_slots(const SlotParams& params, cudaStream_t stream);

}  // namespace sqz::cuda
