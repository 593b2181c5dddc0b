// The work of sqz-generate: answers prompts over the fixed context of one index.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/common/selector_options.h"
#include "tools/common/tool.h"
#include "training/runner.h"

namespace sqz {

struct GenerateArguments {
  std::string model, index;
  std::vector<std::string> prompts, prompt_files;  // both empty: one a line of standard input
  int64_t batch = 0;  // prompts that are answered together; 0: one after the other
  bool dense = false, escapes = false;
  std::optional<bool> chat;  // put prompts into the user's turn; none: if the index has turns
  std::string run_dtype;
  GenerateOptions generate;
  SelectorOptions selector;
};

void add_generate_options(CLI::App& app, GenerateArguments& arguments);

Status run_generate(const GenerateArguments& arguments, const ToolContext& context);

}  // namespace sqz
