// One index, from a dense pass of a model or from a capture file: IndexBuilder::prepare() and
// begin(), then build_index().
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
  BuildOptions options;
  FixedContext* front = nullptr;  // BuildOptions::after; the text begins at position 0 behind it
  std::shared_ptr<const CaptureReader> capture;
};

// kUnsupported or kMismatch if the capture lacks what the build needs: keys after RoPE, and the
// queries of the last `options.tail` tokens.
Result<BuildInput> open_capture(const std::string& path, const BuildOptions& options);

// Adds all layers and publishes. `runner` is null with a capture.
Result<BuildReport> build_index(IndexBuilder& builder, const BuildInput& input, Runner* runner,
                                Progress& progress);

}  // namespace sqz
