// One index, from a dense pass of a model or from a capture file: plan_index(), then
// IndexBuilder::begin(), then build_index().
#pragma once

#include <memory>
#include <string>

#include "formats/capture.h"
#include "libindex/builder.h"
#include "tools/common/progress.h"
#include "tools/sqz_index/source.h"
#include "training/runner.h"

namespace sqz {

// A fixed context, and the capture that its keys come from; without one a model makes them.
struct BuildInput {
  ModelDescription model;
  FixedTokens tokens;
  JsonText chat;                   // as IndexMetadata::chat
  std::vector<std::string> after;  // as IndexMetadata::after
  FixedContext* front = nullptr;   // these contexts; the text begins at position 0 behind them
  std::shared_ptr<const CaptureReader> capture;
};

Result<BuildInput> open_capture(const std::string& path);

// kUnsupported or kMismatch if a capture lacks what the build needs: keys after RoPE, and the
// queries of the last `options.tail` tokens. Errors of IndexBuilder::prepare().
Result<std::unique_ptr<IndexBuilder>> plan_index(const BuildInput& input, BuildOptions options);

struct BuiltIndex {
  BuildReport report;
  double capture_seconds = 0;  // of the dense pass, or of reading the capture
};

// Adds all layers and publishes. `runner` is null with a capture.
Result<BuiltIndex> build_index(IndexBuilder& builder, const BuildInput& input, Runner* runner,
                               Progress& progress);

}  // namespace sqz
