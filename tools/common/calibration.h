// Calibrates an index with prompts. The model answers each prompt with dense attention to the
// index's own keys and values, and the queries of this run calibrate (libindex/recalibrate.h).
#pragma once

#include "libindex/recalibrate.h"
#include "training/runner.h"

namespace sqz {

struct CalibrationPrompts {
  std::vector<std::vector<int32_t>> prompts;  // token ids; no prompt is empty
  int64_t answer_tokens = 16;                 // of each greedy answer, 0 or more
  int64_t position = 0;  // of a prompt's first token; 0: the position behind the index
};

// Writes the calibrated index to `output`. Returns its size. A prompt is one call, as in the
// runtime, and so is each token of an answer. kMismatch if the index is of another model,
// kUnsupported if it has no clusters.
Result<uint64_t> calibrate_with_prompts(Runner& runner, const SqzFile& index,
                                        const CalibrationPrompts& prompts,
                                        const std::string& output,
                                        const RecalibrateOptions& options,
                                        const std::function<void(double)>& progress);

}  // namespace sqz
