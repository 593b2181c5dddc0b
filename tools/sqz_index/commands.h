// The subcommands of sqz-index. Each adds itself to the tool with its options.
#pragma once

#include "tools/common/tool.h"

namespace sqz {

void add_build_command(Tool& tool);
void add_calibrate_command(Tool& tool);
void add_compress_command(Tool& tool);
void add_info_command(Tool& tool);
void add_prune_command(Tool& tool);
void add_verify_command(Tool& tool);

}  // namespace sqz
