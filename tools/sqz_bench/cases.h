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

// One query token over the fixed context; `queries` prompt tokens over a shorter one.
Result<CaseSetup> attend_case(const Options& options);
Result<CaseSetup> prefill_case(const Options& options);
// Plain reads of memory.
Result<CaseSetup> bandwidth_case(const Options& options);
// Opening a sparse file of many GiB, and a small one.
Result<CaseSetup> open_case(const Options& options);
// Every checksum and invariant of an index in the page cache.
Result<CaseSetup> verify_case(const Options& options);
// k-means of one layer's keys by an engine, from host memory; with Options::gpu by the kernels of
// engine `cuda`, in GPU memory.
Result<CaseSetup> kmeans_case(const Options& options);

}  // namespace sqz::bench
