// What a benchmark ran on, as far as it decides the figures.
#pragma once

#include "formats/base/json.h"
#include "tools/common/output.h"

namespace sqz::bench {

struct Machine {
  // {cpu, cores, caches{L1d, L2, L3}, memory_bytes, isa, compiler, version, libtorch, threads,
  // load}
  JsonMembers fields;
  Rows rows;  // the same for people
};
// `isa`: the instruction set that libruntime's kernels were dispatched to. Its load: processes that
// wanted to run in the last minute, before the run.
Machine describe_machine(const std::string& isa, int threads);

// "2.11.0", or "" without LibTorch.
std::string torch_version();

}  // namespace sqz::bench
