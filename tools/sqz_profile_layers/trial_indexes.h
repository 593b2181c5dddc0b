// Indexes for trials, of the windows that a profile runs over. The passes of the profile build
// them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/base/temporaries.h"
#include "libindex/builder.h"
#include "training/profile.h"
#include "training/runner.h"

namespace sqz {

// The files are beside `output`, and are removed at the end. consume() is the profile's consumer.
class TrialIndexes {
 public:
  TrialIndexes(std::string output, const ModelDescription& model, std::string tokenizer_hash,
               BuildOptions options)
      : output_(std::move(output)),
        model_(model),
        tokenizer_hash_(std::move(tokenizer_hash)),
        options_(std::move(options)) {}
  TrialIndexes(const TrialIndexes&) = delete;
  TrialIndexes& operator=(const TrialIndexes&) = delete;

  // Adds the window of the next pass and returns the path of its index. `tokens` is borrowed.
  std::string add(std::span<const int32_t> tokens);
  Status consume(int64_t window, const LayerCapture& layer);

 private:
  struct Window {
    TemporaryName name;
    std::span<const int32_t> tokens;
  };

  std::string output_;
  const ModelDescription& model_;
  std::string tokenizer_hash_;
  BuildOptions options_;
  std::vector<Window> windows_;
  std::unique_ptr<IndexBuilder> builder_;  // of the window at hand
};

}  // namespace sqz
