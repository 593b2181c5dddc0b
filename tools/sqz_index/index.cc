// sqz-index: builds, calibrates, describes and checks the index of a fixed context.
#include "tools/common/mains.h"
#include "tools/sqz_index/commands.h"

int sqz::index_main(int argc, char** argv) {
  Tool tool("sqz-index",
            "Builds, calibrates, describes and checks the index (.sqz) of a fixed context.",
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
  add_build_command(tool);
  add_calibrate_command(tool);
  add_compress_command(tool);
  add_info_command(tool);
  add_prune_command(tool);
  add_verify_command(tool);
  return tool.run(argc, argv);
}
