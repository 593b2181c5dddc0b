// sqz-eval: what a selector costs in quality, and what it reads, against dense attention.
#include "tools/sqz_eval/eval.h"

int main(int argc, char** argv) {
  sqz::Tool tool("sqz-eval", sqz::eval::kDescription, sqz::eval::kHelp);
  sqz::eval::EvalArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::eval::run_eval(arguments, context); });
  sqz::eval::add_eval_options(*app, arguments);
  return tool.run(argc, argv, true);
}
