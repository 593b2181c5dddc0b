#include "libindex/prune.h"

#include "libruntime/select/registry.h"
#include "tools/common/selector_options.h"
#include "tools/common/output_file.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct PruneArguments {
  std::string index, output, selector, layers;
  double budget = 0.125;
  bool force = false;
};

Result<SelectorKind> kind_of(const std::string& name) {
  for (const SelectorKind kind :
       {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    if (name == selector_name(kind)) return kind;
  }
  return Status(Code::kInvalidArgument,
                concat("--selector: found ", name, ", expected window, stream or h2o"));
}

Status run_prune(const PruneArguments& arguments, const ToolContext& context) {
  SelectionRequest policy;
  SQZ_ASSIGN_OR_RETURN(policy.selector, kind_of(arguments.selector));
  policy.budget = arguments.budget;
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  std::vector<double> scales;
  policy.uniform_layers = arguments.layers == kUniformLayers;
  if (!arguments.layers.empty() && !policy.uniform_layers) {
    SQZ_ASSIGN_OR_RETURN(const LayerBudgets budgets,
                         read_layer_budgets(arguments.layers, index->metadata().model));
    scales.assign(budgets.budget.begin(), budgets.budget.end());
    policy.layer_scales = scales;
  }
  SQZ_RETURN_IF_ERROR(
      check_output(arguments.output, arguments.force, {arguments.index, arguments.layers}));
  SQZ_ASSIGN_OR_RETURN(const PruneReport report,
                       prune_index(Env::posix(), index, policy, arguments.output, arguments.force,
                                   context.options.threads));
  context.output.result({{"path", arguments.output},
                         {"bytes", report.bytes},
                         {"bytes_before", index->file_bytes()},
                         {"selector", arguments.selector},
                         {"budget", report.budget},
                         {"keep", report.keep},
                         {"kept", report.kept}});
  return {};
}

}  // namespace

void add_prune_command(Tool& tool) {
  const auto arguments = std::make_shared<PruneArguments>();
  CLI::App* app = tool.command(
      "prune", "Leave out of an index the keys that a policy never reads.",
      "For selectors whose choice no question changes. The result serves that selector at that\n"
      "budget alone, with the same answers to the bit, and takes little more than the budget of\n"
      "the room, on the disk and in memory.\n\n"
      "Result: path, bytes, bytes_before, selector, budget, keep, kept[] (keys a KV head, by\n"
      "layer).\n"
      "\n"
      "Examples:\n"
      "  sqz-index prune book.sqz --selector h2o --budget 0.1 -o small.sqz\n"
      "  sqz-index prune book.sqz --selector window --layers layers.json -o small.sqz\n",
      [arguments](const ToolContext& context) { return run_prune(*arguments, context); });
  app->add_option("INDEX", arguments->index, "The index (.sqz)")->required();
  app->add_option("-o,--output", arguments->output, "The index to write")->required();
  app->add_flag("--force", arguments->force, "Replace an existing output");
  app->add_option("--selector", arguments->selector, "window, stream or h2o")->required();
  app->add_option("--budget", arguments->budget,
                  "Fraction of the fixed context's bytes that are read and kept")
      ->check(real_number(1e-6, 1.0))
      ->capture_default_str();
  app->add_option("--layers", arguments->layers,
                  "Spread the budget over the layers by a profile of sqz-profile-layers; uniform = "
                  "all alike (default: what the index embeds)")
      ->type_name("L.json");
}

}  // namespace sqz
