// The cases that run on a GPU. Built without CUDA, they say so.
#pragma once

#include "tools/sqz_bench/cases.h"

namespace sqz::bench {

// kUnsupported, naming --device, if options.gpu cannot be used.
Status check_device(const Options& options);

// `attend` and `prefill` from a session on the GPU, as graphs of calls that are replayed. Calls of
// `attend` go over copies of the layer in turn, so that nothing is in the L2 when it is read.
Result<CaseSetup> attend_device_case(const Options& options);
Result<CaseSetup> prefill_device_case(const Options& options);
// From the page cache to the GPU.
Result<CaseSetup> upload_device_case(const Options& options);

}  // namespace sqz::bench
