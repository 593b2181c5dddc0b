// Counts selections that were known before a call: nothing looks them up that could count them.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/status.h"

namespace sqz::cuda {

// counters: {selections, keys, vectors, …}, in device memory. On the stream, so that replays of a
// graph count.
Status add_counters(unsigned long long* counters, unsigned long long selections,
                    unsigned long long keys, unsigned long long vectors, cudaStream_t stream);

}  // namespace sqz::cuda
