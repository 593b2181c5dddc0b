// The cases of sqz-bench. A case sets up contenders; bench.cc measures and reports them. A new case
// is a function in its own file and a line in the list of bench.cc.
#pragma once

#include <string>
#include <vector>

#include "tools/sqz_bench/measure.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

struct CaseSetup {
  JsonMembers shape;                   // what is measured, for the result
  std::vector<std::string> baselines;  // contenders that the others are compared with
  std::vector<Contender> contenders;
  int64_t rounds = 0;
};

// One query token a request over the fixed context; `queries` prompt tokens over a shorter one.
Result<CaseSetup> attend_case(const Options& options);
Result<CaseSetup> prefill_case(const Options& options);
// Plain reads of memory.
Result<CaseSetup> bandwidth_case(const Options& options);
// Opening a sparse file of many GiB, and smaller ones.
Result<CaseSetup> open_case(const Options& options);
// Every checksum and invariant of an index in the page cache.
Result<CaseSetup> verify_case(const Options& options);
// k-means of one layer's keys by an engine, from host memory.
Result<CaseSetup> kmeans_case(const Options& options);

// The cases on a GPU. Built without CUDA, they say so.

// kInvalidArgument, naming --device, if options.gpu cannot be used.
Status check_device(const Options& options);
// Sessions on the GPU, as graphs of calls that are replayed. Calls of `attend` go over copies of
// the layer in turn, so that nothing is in the L2 when it is read.
Result<CaseSetup> attend_device_case(const Options& options);
Result<CaseSetup> prefill_device_case(const Options& options);
// The kernels of libindex/cuda/kmeans.h on points that lie in GPU memory already, as they do in a
// build with --device cuda: 10 iterations and the labels that follow from them, on two streams and
// on one; as many assignments as iterations, which is what other programs count; and, where it was
// built in, FAISS on the same GPU, one head.
Result<CaseSetup> kmeans_device_case(const Options& options);
// From the page cache to the GPU.
Result<CaseSetup> upload_device_case(const Options& options);

}  // namespace sqz::bench
