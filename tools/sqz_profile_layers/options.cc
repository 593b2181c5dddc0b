#include "tools/common/model_options.h"
#include "tools/sqz_profile_layers/profile_layers.h"

namespace sqz {
namespace {

void add_measure_options(CLI::App& app, ProfileArguments& arguments) {
  const HelpSection section(app, "Measuring on held-out text");
  app.add_option("--allocate", arguments.allocate,
                 "groups (the paper's), or measured: by the losses that each layer's errors cause")
      ->check(CLI::IsMember({kAllocationGroups, kAllocationMeasured}));
  app.add_option("--selector", arguments.selector, "The selector that reads")
      ->check(CLI::IsMember({"squeezed", "quest", "ideal", "stream", "window", "h2o"}));
  app.add_option("--block", arguments.block,
                 "Held-out tokens that share a selection; 0 = all of them")
      ->check(whole_number(0));
  app.add_option("--held-out", arguments.held_out,
                 "Tokens behind each window whose loss is measured")
      ->check(CLI::Range(int64_t{128}, int64_t{65536}))
      ->type_name("N");
}

}  // namespace

void add_profile_options(CLI::App& app, ProfileArguments& arguments) {
  app.add_option("TEXT", arguments.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input")
      ->required();
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-o,--output", arguments.output,
                 "The layer profile (.json) to write; may be left out with --index");
  auto* index = app.add_option("-i,--index", arguments.index,
                               "Profile on this index's context, which TEXT begins with, and embed "
                               "the budgets into it");
  app.add_flag("--force", arguments.force, "Replace an existing output");
  app.add_option("--tokens", arguments.tokens,
                 "Tokens of a window, which is one dense pass (default: the model's positions, at "
                 "most 16384)")
      ->check(whole_number(1))
      ->type_name("N")
      ->excludes(index);
  app.add_option("--windows", arguments.windows, "Windows of each text; 0 = all of it")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->type_name("N")
      ->capture_default_str()
      ->excludes(index);
  app.add_option("--budget", arguments.budget,
                 "Fraction of the context that a layer reads, if all read the same")
      ->check(real_number(1e-9, 1.0))
      ->capture_default_str();
  app.add_option(
         "--p", arguments.p,
         "Share of that budget that layers of group 2 keep, with --allocate groups; 1 = all alike")
      ->check(real_number(1e-9, 1.0))
      ->capture_default_str();
  app.add_option("--context", arguments.context,
                 "Tokens of the context that budgets are for (default: those of a window)")
      ->check(CLI::Range(int64_t{1}, int64_t{UINT32_MAX}))
      ->type_name("N");
  add_run_dtype_option(app, arguments.run_dtype);
  add_measure_options(app, arguments);
}

}  // namespace sqz
