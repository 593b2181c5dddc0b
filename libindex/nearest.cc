#include "libindex/nearest.h"

#include <algorithm>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/kernels/cpu/offline_kernels.h"

namespace sqz {

NearestCentroids::NearestCentroids(const float* centroids, int64_t clusters, int64_t dim)
    : clusters_(clusters),
      dim_(dim),
      panels_(static_cast<size_t>(round_up(clusters, kPanel) * dim)) {
  for (int64_t c = 0; c < round_up(clusters, kPanel); ++c) {
    const float* from = centroids + std::min(c, clusters - 1) * dim;
    float* to = panels_.data() + c / kPanel * kPanel * dim + c % kPanel;
    for (int64_t k = 0; k < dim; ++k) to[k * kPanel] = from[k];
  }
}

void NearestCentroids::find(const float* points, int64_t n, float* products,
                            int64_t* labels) const {
  offline_kernels().nearest(points, n, dim_, panels_.data(), clusters_, products, labels);
}

}  // namespace sqz
