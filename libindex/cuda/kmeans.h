// Batched spherical k-means on one GPU: every head of a layer group at once, exact, deterministic.
//
//   kmeans_workspace -> kmeans_run            the loop, ends with labels and cluster order
//   cluster_means, gather_rows                what an index stores, from `order` and `offsets`
//
// Everything takes device pointers and a stream, allocates nothing and never waits for the device,
// so that a caller may capture it in a CUDA graph. Nothing here keeps state between calls; calls
// with different buffers may run on different streams at once.
//
// Semantics. Points are clustered by the cosine: a point belongs to the centroid with the largest
// dot product, computed exactly for the bf16 operands (tensor cores find the candidates, near ties
// are decided in float64, equal products by the lower cluster number). A centroid is the
// normalised mean of its members' normalised vectors, rounded to bf16. Sums are taken in fixed
// point, so that they do not depend on the order of addition: results are the same bytes from
// run to run, whatever the scheduling. After `iterations` rounds of assign and update, points are
// assigned once more.
// A cluster left empty by an assignment gets a member of the largest one (largest by D'Hondt's
// rule where several are empty) as its new centroid; after the last assignment it gets such a
// member itself, so that every cluster of the result has at least one point.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "formats/base/status.h"

namespace sqz::cuda {

struct KmeansShape {
  int32_t heads = 0;     // B: independent problems
  int32_t points = 0;    // N: points of each, up to 2^30
  int32_t dim = 0;       // d: 32, 64, 96, 128 or 256
  int32_t clusters = 0;  // C: 1 .. min(N, 131072)
};

enum class AssignKernel : int32_t {
  kAuto = 0,    // the fastest that the current device and the shape allow
  kPlain = 1,   // any GPU from compute capability 8.0
  kHopper = 2,  // compute capability 9.0; d of 64, 96, 128 or 256
};

// Faults of the points that a run found, as bits of KmeansParams::fault.
inline constexpr uint32_t kKmeansFaultNotFinite = 1;  // a NaN, an infinity or a norm above 1e18

struct KmeansParams {
  KmeansShape shape;
  int32_t iterations = 10;
  uint64_t seed = 0;                // of the first centroids: head b's come from `seed` and b
  const uint64_t* seeds = nullptr;  // [B] device memory, or null: of each head, instead of `seed`
  AssignKernel kernel = AssignKernel::kAuto;

  // Inputs, device memory, 16-byte aligned. A point of norm below 1e-18 counts as zero: it belongs
  // to cluster 0 and moves no centroid.
  const void* points = nullptr;       // [B, N, d] bf16, of any norm
  const uint32_t* weights = nullptr;  // [B, N] or null: multiplies a point's part in its centroid

  // Outputs, device memory.
  void* centroids = nullptr;    // [B, C, d] bf16, 16-byte aligned: unit vectors, last update
  uint32_t* labels = nullptr;   // [B, N]
  uint32_t* order = nullptr;    // [B, N]: points by cluster, ascending within a cluster
  uint32_t* offsets = nullptr;  // [B, C + 1]: first place in `order`; the last one is N
  float* cosines = nullptr;     // [B, N] or null: of each point and its centroid, to within 1e-4
  uint32_t* fault = nullptr;    // [1]: 0, or kKmeansFault... bits; the rest is then meaningless

  void* workspace = nullptr;  // 256-byte aligned
  size_t workspace_bytes = 0;

  // Another stream, or null. With one, half of the heads take turns with the other half: the
  // centroids of one are updated, which memory traffic bounds, while the points of the other are
  // assigned, which arithmetic bounds. The stream given to kmeans_run waits for this one.
  cudaStream_t second_stream = nullptr;
};

// Bytes of workspace that a run of this shape needs: 16 a point and 20 a cluster; with 40 points a
// cluster or more 24 and 24 + 4 d. kInvalidArgument if the shape cannot be run.
Result<size_t> kmeans_workspace(const KmeansShape& shape);

// Enqueues the whole loop. kInvalidArgument names a wrong parameter, kUnsupported a device that is
// too old, kInternal a CUDA error.
Status kmeans_run(const KmeansParams& params, cudaStream_t stream);

// Enqueues one exact assignment to params.centroids as they are (an input here): labels and, if
// not null, cosines. iterations, seed, weights, order and offsets are not used.
Status kmeans_assign(const KmeansParams& params, cudaStream_t stream);

// means[b, c] = the (weighted) mean over i in [offsets[b, c], offsets[b, c + 1]) of
// rows[b, order[b, i]], rounded to the type of the rows; sums of 64 in float32, of these in
// float64, always in the same order. dim: a multiple of 8, up to 256.
struct MeansParams {
  KmeansShape shape;                  // heads, rows, dim, clusters
  bool float16 = false;               // rows and means are f16
  const void* rows = nullptr;         // [B, N, d] bf16
  const uint32_t* weights = nullptr;  // [B, N] or null
  const uint32_t* order = nullptr;    // [B, N]
  const uint32_t* offsets = nullptr;  // [B, C + 1]
  void* means = nullptr;              // [B, C, d] bf16
};
Status cluster_means(const MeansParams& params, cudaStream_t stream);

// out[b, i] = rows[b, order[b, i]]: K or V in slot order. rows and out must not overlap.
struct GatherParams {
  int32_t heads = 0, points = 0, dim = 0;  // dim: a multiple of 8
  const void* rows = nullptr;              // [B, N, d] bf16
  const uint32_t* order = nullptr;         // [B, N]
  void* out = nullptr;                     // [B, N, d] bf16
};
Status gather_rows(const GatherParams& params, cudaStream_t stream);

// Renumbers clusters depth-first under their parents: the clusters of parent 0 come first, in
// their old order, then those of parent 1, ... Points keep their order inside a cluster.
struct DepthFirstParams {
  int32_t heads = 0, points = 0, clusters = 0;
  const uint32_t* order = nullptr;          // [B, N]: points by old cluster
  const uint32_t* offsets = nullptr;        // [B, C + 1]: of old clusters
  const uint32_t* cluster_order = nullptr;  // [B, C]: old clusters by parent (order of the level
                                            // above)
  uint32_t* new_order = nullptr;            // [B, N]
  uint32_t* new_offsets = nullptr;          // [B, C + 1]
};
Status depth_first_order(const DepthFirstParams& params, cudaStream_t stream);

}  // namespace sqz::cuda
