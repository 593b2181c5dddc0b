// One index, from a dense pass of a model or from a capture file.
#pragma once

#include <optional>
#include <string>

#include "formats/capture.h"
#include "libindex/builder.h"
#include "tools/common/calibration.h"
#include "tools/common/progress.h"
#include "tools/sqz_index/source.h"
#include "tools/sqz_index/token_gate.h"

namespace sqz {

struct IndexTarget {
  std::string path;
  bool force = false;
  BuildOptions options;
};

struct BuiltIndex {
  BuildReport report;
  double capture_seconds = 0;        // dense pass, or reading the capture
  std::string fingerprint;           // of the model
  std::string calibration = "tail";  // what calibrated: the file's calibration.source
};

// The index that is there, if it is what this build would make: IndexBuilder::find().
Result<BuiltIndex> find_built(const ModelDescription& model, const FixedTokens& tokens,
                              const IndexTarget& target);

// With a gate, the model waits its turn there, and runs on a stream of its own: other threads may
// build with the same runner.
Result<BuiltIndex> build_from_model(Runner& runner, const FixedTokens& tokens,
                                    const IndexTarget& target, Progress& progress,
                                    TokenGate* gate = nullptr);

// The same, calibrated with prompts. They are answered from an index under a temporary name, which
// takes as much room on the disk as the result and is removed at the end.
Result<BuiltIndex> build_with_prompts(Runner& runner, const FixedTokens& tokens,
                                      const IndexTarget& target, const CalibrationPrompts& prompts,
                                      Progress& progress);

Result<BuiltIndex> build_from_capture(const CaptureReader& capture, const IndexTarget& target,
                                      Progress& progress);

// What a result says of an index.
JsonMembers index_json(const std::string& path, const BuiltIndex& index);

// The capture has what a build needs: keys after RoPE, and the queries of the last `tail` tokens.
Status check_capture(const CaptureInfo& info, const std::string& path, int64_t tail);

// The positions of the last `count` of `tokens` tokens (all of them if there are fewer).
std::vector<int64_t> last_positions(int64_t tokens, int64_t count);

}  // namespace sqz
