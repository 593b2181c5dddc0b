// sqz-bench: what this machine does, beside what it could do.
#include "tools/common/tool.h"
#include "tools/sqz_bench/options.h"

int main(int argc, char** argv) {
  sqz::Tool tool("sqz-bench", sqz::bench::kDescription, sqz::bench::kHelp);
  sqz::bench::Options options;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::bench::run_bench(options, context); });
  sqz::bench::add_bench_options(*app, options);
  return tool.run(argc, argv);
}
