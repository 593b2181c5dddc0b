// The work around the training that both trainers of k-means on the CPU share (faiss_kmeans.cc and
// without/faiss_kmeans.cc).
#pragma once

#include <memory>
#include <vector>

#include "libindex/kmeans.h"
#include "libindex/nearest.h"

namespace sqz {

// Returns the centroids [clusters, dim] after `problem.iterations` updates. `unit`: the points,
// normalised; 1 < clusters < count. Uses `threads` threads. May throw.
using LloydTrainer = Result<std::vector<float>> (*)(const KmeansProblem& problem, const float* unit,
                                                    int threads);

// The engine "faiss". It solves as many problems at a time as there are threads, one thread each.
// The problems that are left over follow, each with all threads.
std::unique_ptr<KmeansEngine> make_lloyd_kmeans(LloydTrainer trainer);

// NearestCentroids::find() for points [n, dim] on `threads` threads.
Status find_nearest(const NearestCentroids& centroids, const float* points, int64_t n, int64_t dim,
                    int threads, float* products, int64_t* labels);

}  // namespace sqz
