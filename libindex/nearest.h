// Finds the nearest centroid of a key, for k-means and for the buckets of a classifier.
#pragma once

#include <cstdint>
#include <vector>

namespace sqz {

// A copy of the centroids, in the layout that the search needs.
class NearestCentroids {
 public:
  // centroids [clusters, dim], finite; at least one.
  NearestCentroids(const float* centroids, int64_t clusters, int64_t dim);

  // For each point [n, dim]: the largest inner product with a centroid, and the number of that
  // centroid, the lowest among equals. Uses one thread and allocates nothing. The answer for a
  // point does not depend on the other points, and is the same on all processors with fused
  // multiply-add.
  void find(const float* points, int64_t n, float* products, int64_t* labels) const;

 private:
  int64_t clusters_, dim_;
  std::vector<float> panels_;  // see OfflineKernels::nearest
};

}  // namespace sqz
