// Prompts that are answered together over one index.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "formats/tokenizer.h"
#include "training/runner.h"

namespace sqz {

struct BatchAnswer {
  int64_t index = 0;  // of the prompt, from 0
  std::string prompt, text;
  Generation generation;
};

struct Batch {
  int64_t width = 1;         // most prompts at once
  GenerateOptions generate;  // of each
  std::vector<std::string> stops;
  // As BatchOptions::next, of prompts as they were given.
  std::function<Result<std::optional<std::string>>(bool wait, bool& ended)> next;
  std::function<Result<std::vector<int32_t>>(const std::string& prompt)> encode;
  std::function<void(const BatchAnswer&)> answered;  // as they end
};

// Ends early, with what there is by then, once the tool is stopped.
Status answer_batch(Runner& runner, FixedContext& context, const Tokenizer& tokenizer,
                    const Batch& batch);

// Hands out one prompt after the other for Batch::next.
std::function<Result<std::optional<std::string>>(bool wait, bool& ended)> prompts_of(
    std::vector<std::string> prompts);
// The lines of a descriptor, as they come; empty ones are left out.
std::function<Result<std::optional<std::string>>(bool wait, bool& ended)> prompts_from(
    int descriptor);

}  // namespace sqz
