// sqz-index: builds, calibrates, describes, checks and draws the index of a fixed context.
#include "tools/sqz_index/commands.h"

int main(int argc, char** argv) {
  sqz::Tool tool("sqz-index",
                 "Builds, calibrates, describes and checks the index (.sqz) of a fixed context.",
                 "Examples:\n"
                 "  sqz-index build --model MODEL book.txt -o book.sqz\n"
                 "  sqz-index info book.sqz\n"
                 "  sqz-index verify book.sqz\n"
                 "  sqz-index report book.sqz -o book.html\n"
                 "'sqz-index COMMAND --help' has the options of a command.\n");
  sqz::add_append_command(tool);
  sqz::add_build_command(tool);
  sqz::add_calibrate_command(tool);
  sqz::add_capture_command(tool);
  sqz::add_info_command(tool);
  sqz::add_prune_command(tool);
  sqz::add_report_command(tool);
  sqz::add_verify_command(tool);
  return tool.main(argc, argv);
}
