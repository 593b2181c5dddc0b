// Spherical k-means, which partitions the keys of a KV head.
//
// Points are compared by cosine: every engine L2-normalises them first, and its centroids are unit
// vectors (paper 3.1). An engine returns assignments only. The stored centroids are means of the
// raw keys, and libindex/tree.h computes them for every engine.
//
// The same problem gives the same assignment, for any number of threads and in any batch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "formats/base/status.h"

namespace sqz {

class LayerEngine;

// All pointers are borrowed for the call.
struct KmeansProblem {
  const float* points = nullptr;   // [count, dim] finite; of any length, not normalised
  const float* weights = nullptr;  // [count] positive whole numbers (keys below), or null = all 1
  int64_t count = 0;
  int64_t dim = 0;
  int64_t clusters = 0;  // C, 1 <= C <= count
  int iterations = 10;   // updates of the centroids; one more assignment follows the last
  uint64_t seed = 0;
  int32_t* assignment = nullptr;  // out: [count] in [0, C), every cluster at least once
};

class KmeansEngine {
 public:
  virtual ~KmeansEngine() = default;
  virtual std::string name() const = 0;
  // Solves a batch, normally the KV heads of one layer. `done` (may be empty) is called after each
  // problem, one call at a time.
  virtual Status run(std::span<const KmeansProblem> problems, int threads,
                     const std::function<void()>& done) = 0;
  // The part of the engine that takes a whole layer from keys to stored tensors on its device
  // (libindex/layer_engine.h), owned by the engine; null for an engine that only clusters.
  virtual LayerEngine* layer_engine() { return nullptr; }
};

struct EngineChoice {
  std::string name = "auto";
  int64_t dim = 0;  // of the points
  int gpu = 0;      // number of the CUDA device, for the engines that use one
};

// By name:
//   "faiss"  on the CPU, always there
//   "cuda"   this project's kernels, where sqz was built with SQZ_CUDA
//   "auto"   cuda where it can run, else faiss
// Another name is kInvalidArgument. So is an engine that cannot run here, and the message says why:
// not compiled in, no GPU, driver or GPU too old, or a `dim` that it cannot do.
Result<std::unique_ptr<KmeansEngine>> make_kmeans_engine(const EngineChoice& choice);

// Lloyd's iterations by faiss::Clustering, without subsampling, on the CPU. Same bytes on every
// processor with fused multiply-add, whatever the number of threads.
std::unique_ptr<KmeansEngine> make_faiss_kmeans();
// libindex/cuda/kmeans.h. Same bytes from run to run on GPUs of one kind.
Result<std::unique_ptr<KmeansEngine>> make_cuda_kmeans(int64_t dim, int gpu);

// A seed for each (layer, head, level) of a build, so that no head depends on the order of work.
uint64_t kmeans_seed(uint64_t seed, int64_t layer, int64_t head, int64_t level);

// out[i] = points[i] / |points[i]|; a zero row stays zero. May not alias.
void normalise_rows(const float* points, int64_t count, int64_t dim, float* out);

// Gives every empty cluster a part of the largest cluster (most points, lowest number among
// equals), which is cut between two distant points, or in the middle if all points are alike.
// `unit`: [count, dim] normalised points, count >= clusters. No cluster is empty afterwards.
void refill_empty_clusters(const float* unit, int64_t count, int64_t dim, int64_t clusters,
                           int32_t* assignment);

}  // namespace sqz
