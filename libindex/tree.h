// The centroid tree of one KV head (paper 3.3). The finest level clusters the keys. Every other
// level clusters the centroids of the next finer level, weighted by the number of keys below each.
//
// Vectors over levels go from coarse to fine: [0] is level 1 of the paper.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "libindex/kmeans.h"

namespace sqz {

struct HeadTree {
  // parents[k][i]: the cluster of means[k] that holds its child i, a cluster of means[k + 1] or, at
  // the finest level, a key. Every cluster has a child.
  std::vector<std::vector<int32_t>> parents;
  // means[k]: [n_k, d] float32, mean of the raw keys below each cluster.
  std::vector<std::vector<float>> means;
};

struct TreeOptions {
  std::vector<int64_t> clusters;  // n_k, coarse to fine: as from cluster_counts()
  int iterations = 10;
  uint64_t seed = 0;
  int64_t layer = 0;  // for the seeds
  int threads = 1;
};

// n_k = round(fraction x tokens) for each level, coarse to fine. At least 1, and at most the number
// of clusters of the next finer level, or `keys` for the finest.
std::vector<int64_t> cluster_counts(std::span<const double> fractions, int64_t tokens,
                                    int64_t keys);

// One tree a head. heads[h]: [keys, dim] float32, finite, borrowed. `progress(done, total)` counts
// heads whose finest level, nearly all of the work, is done.
Result<std::vector<HeadTree>> build_trees(KmeansEngine& engine, std::span<const float* const> heads,
                                          int64_t keys, int64_t dim, const TreeOptions& options,
                                          const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sqz
