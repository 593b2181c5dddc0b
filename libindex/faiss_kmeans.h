// What the engines on FAISS share.
#pragma once

#include <faiss/Index.h>

#include "libindex/kmeans.h"

namespace sqz {

// Spherical k-means of a problem by faiss::Clustering, without subsampling. `index` finds the
// centroid with the largest inner product. May throw what FAISS throws.
Status faiss_lloyd(const KmeansProblem& problem, faiss::Index& index);

}  // namespace sqz
