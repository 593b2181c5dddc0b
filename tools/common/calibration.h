// Calibrates an index with prompts. The model answers each prompt with dense attention to the
// index's own keys and values, and the queries of this run calibrate (libindex/recalibrate.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libindex/recalibrate.h"
#include "training/runner.h"

namespace sqz {

inline constexpr int64_t kAnswerTokens = 16;

struct CalibrationPrompts {
  std::vector<std::vector<int32_t>> prompts;  // token ids; no prompt is empty
  int64_t answer_tokens = kAnswerTokens;      // of each greedy answer, 0 or more
  int64_t position = 0;  // of a prompt's first token; 0: the position behind the index
};

// Records the queries of the prompts and of their answers over the index at `path`. A prompt is one
// call, as in the runtime, and so is each token of an answer.
Result<RecordedQueries> record_queries(Runner& runner, const std::string& path,
                                       const CalibrationPrompts& prompts, int threads,
                                       const std::function<void(double)>& progress);

// Records the queries, and writes the calibrated index to `output`. Returns its size. kMismatch if
// the index is of another model.
Result<uint64_t> calibrate_with_prompts(Runner& runner, const std::string& path,
                                        const CalibrationPrompts& prompts,
                                        const std::string& output,
                                        const RecalibrateOptions& options,
                                        const std::function<void(double)>& progress);

// kUnsupported if the index cannot be calibrated with prompts: it has no clusters, or no keys.
Status check_prompts_possible(const SqzFile& index);

}  // namespace sqz
