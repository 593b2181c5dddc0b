// The subcommands of sqz-index. Each adds itself to the tool with its options.
#pragma once

#include "tools/common/tool.h"

namespace sqz {

void add_append_command(Tool& tool);
void add_build_command(Tool& tool);
void add_calibrate_command(Tool& tool);
void add_capture_command(Tool& tool);
void add_compress_command(Tool& tool);
void add_corpus_command(Tool& tool);
void add_gc_command(Tool& tool);
void add_info_command(Tool& tool);
void add_prune_command(Tool& tool);
void add_verify_command(Tool& tool);

// The result of `gc` and of `corpus gc`.
void print_leftovers(const std::vector<std::string>& files, bool removed,
                     const ToolContext& context);

}  // namespace sqz
