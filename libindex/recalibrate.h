// A finished index calibrated anew, from queries of an engine that served it: prompts and answers
// as users write and get them (libindex/calibrate.h has the method). Everything but the calibration
// is copied.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz {

// The queries that were asked of the fixed context, call by call: after RoPE, float32.
struct RecordedQueries {
  std::vector<int64_t> calls;  // query tokens of each call, each 1 or more; one at least
  std::vector<std::vector<float>> layers;  // [layers][n, Hq, d], n the sum of calls. Empty for
                                           // layers that are stored dense, which need none
  std::string source;                      // for people: "24 prompts", kept in the file
};

struct RecalibrateOptions {
  bool replace = false;  // an existing output
  int threads = 0;       // 0: all cores. The file does not depend on it
};

// kUnsupported if the index has nothing to calibrate: `recalibrate` would fail.
Status check_calibratable(const SqzFile& index);

// Publishes `index` with the calibration of `queries` at `output`, which may be its own path (with
// `replace`): under that name there is the old file or the new one, never a part. Returns the size.
// kCorrupt if the index is damaged: it is read whole and checked first, or the damage would get
// fresh checksums. kNumeric where a query or logit is NaN or infinite. `progress` gets 0 .. 1.
Result<uint64_t> recalibrate(Env& env, const SqzFile& index, const RecordedQueries& queries,
                             const std::string& output, const RecalibrateOptions& options,
                             const std::function<void(double)>& progress = {});

}  // namespace sqz
