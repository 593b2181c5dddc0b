// `kmeans` with --device cuda: the kernels of libindex/cuda/kmeans.h on points that lie in GPU
// memory already, as they do in a build with --device cuda.
#pragma once

#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/kmeans_points.h"

namespace sqz::bench {

// Contenders: 10 iterations and the labels that follow from them, on two streams and on one; as
// many assignments as iterations, which is what other programs count; and, where it was built in,
// FAISS on the same GPU, one head. kUnsupported without CUDA in this build or without a GPU.
Result<CaseSetup> kmeans_device_case(const Options& options, KmeansPoints points);

}  // namespace sqz::bench
