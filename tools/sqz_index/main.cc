// sqz-index: builds, calibrates, describes and checks the index of a fixed context.
#include "tools/sqz_index/commands.h"

int main(int argc, char** argv) {
  sqz::Tool tool(
      "sqz-index", "Builds, calibrates, describes and checks the index (.sqz) of a fixed context.",
      "Examples:\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz\n"
      "  sqz-index info book.sqz\n"
      "  sqz-index verify book.sqz\n"
      "'sqz-index COMMAND --help' has the options of a command.\n"
      "\n"
      "Results go to standard output, everything else to standard error. An output\n"
      "appears under its name when it is whole; one that is there is refused without\n"
      "--force.\n"
      "\n"
      "Built without LibTorch (-DSQZ_TRAINING=OFF) sqz-index builds from captures only,\n"
      "and of the other tools there is sqz-bench alone.\n");
  sqz::add_build_command(tool);
  sqz::add_calibrate_command(tool);
  sqz::add_capture_command(tool);
  sqz::add_compress_command(tool);
  sqz::add_info_command(tool);
  sqz::add_prune_command(tool);
  sqz::add_status_command(tool);
  sqz::add_verify_command(tool);
  return tool.run(argc, argv);
}
