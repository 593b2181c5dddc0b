// Which centroid is nearest to a key: the assignment step of k-means, and of keys to trained
// buckets.
#pragma once

#include <cstdint>
#include <vector>

namespace sqz {

// Centroids laid out for the search, a copy.
class NearestCentroids {
 public:
  // centroids [clusters, dim], finite; at least one.
  NearestCentroids(const float* centroids, int64_t clusters, int64_t dim);

  // For each point [n, dim], the largest inner product with a centroid and that centroid's number,
  // the lowest among equals. On one thread, without allocating. A point's answer does not depend on
  // the others, nor on the processor among those with fused multiply-add.
  void find(const float* points, int64_t n, float* products, int64_t* labels) const;

 private:
  int64_t clusters_, dim_;
  std::vector<float> panels_;  // see OfflineKernels::nearest
};

}  // namespace sqz
