// Calibration (libindex/calibration_scorer.h) counts the scores of serving by these kernels.
#pragma once

#include "libruntime/kernels/cuda/prefill/lookup/select.h"

namespace sqz::cuda {

// counts[head, bin of a score] += keys of its cluster, for all that was scored: kScoreBins counts a
// KV head, zero before. faults[head] becomes 1 where a list of it has one. No list's sizes may sum
// to 2^32.
Status calibration_record(const SelectRuns& scored, unsigned long long* counts, uint32_t* faults,
                          cudaStream_t stream);

}  // namespace sqz::cuda
