#include "tools/common/selector_options.h"

#include <algorithm>

#include "tools/common/tool.h"

namespace sqz {
void add_selector_options(CLI::App& app, SelectorOptions& options, CLI::Option* dense) {
  std::optional<HelpSection> section;
  section.emplace(app, "Selection");
  app.add_option("--selector", options.selector,
                 "What decides which keys are read; auto: what the index was built for (clusters "
                 "squeezed, pages quest, buckets saap, a pruned index its own)")
      ->check(CLI::IsMember(selector_names()));
  app.add_option("--budget", options.budget,
                 "Fraction of the fixed context's bytes to read (default 0.125)")
      ->check(real_number(1e-9, 1.0));
  section.emplace(app, "Advanced");
  app.add_option("--levels", options.levels, "Levels of the tree to use; 0 = all, 1 = flat lookup")
      ->check(CLI::Range(0, 16));
  app.add_option("--rule", options.rule,
                 "The budget held by each head, or one threshold for all (default: budget)")
      ->check(CLI::IsMember({"budget", "threshold"}));
  app.add_option("--block", options.block, "Prompt tokens that share a selection; 0 = all of them")
      ->check(whole_number(0));
  app.add_option("--layers", options.layers,
                 "Spread the budget over the layers by a profile (L.json) of sqz-profile-layers; "
                 "uniform = all alike (default: what the index embeds)")
      ->type_name("L.json");
  app.add_option("--dense-layers", options.dense_layers,
                 "First layers that are read whole (default: what the selector wants, quest 2)")
      ->check(whole_number(0));
  section.reset();
  for (CLI::Option* option : app.get_options()) {
    const bool ours = option->get_group() == "Selection" || option->get_group() == "Advanced";
    if (dense != nullptr && ours) dense->excludes(option);
  }
}

Result<LayerBudgets> read_layer_budgets(const std::string& path, const ModelDescription& model) {
  SQZ_ASSIGN_OR_RETURN(const LayersFile file, read_layers_file(path));
  const Status same = check_same_model(file.model, model, path);
  if (!same.ok()) {
    return Status(same.code(),
                  concat("--layers: ", same.message(), "; profile this model's layers"));
  }
  return LayerBudgets(file);
}

Status load_layers(SelectorOptions& options, const ModelDescription& model) {
  if (options.layers.empty() || options.layers == kUniformLayers) return {};
  SQZ_ASSIGN_OR_RETURN(options.layer_budgets, read_layer_budgets(options.layers, model));
  const std::vector<int64_t>& budget = options.layer_budgets->budget;
  options.layer_scales.assign(budget.begin(), budget.end());
  return {};
}

std::vector<std::string> selector_names() {
  std::vector<std::string> out;
  while (const char* name = sqz_selector_name(static_cast<sqz_selector>(out.size()))) {
    out.emplace_back(name);
  }
  return out;
}

sqz_session_options session_options(const SelectorOptions& options, int threads) {
  auto out = runtime::make<sqz_session_options>();
  out.threads = threads;
  out.block = options.block;
  out.levels = options.levels;
  const std::vector<std::string> names = selector_names();
  const auto selector = std::find(names.begin(), names.end(), options.selector);
  out.selector = static_cast<int32_t>(selector - names.begin());
  if (options.dense_layers)
    out.dense_layers = *options.dense_layers > 0 ? *options.dense_layers : -1;
  out.rule = options.rule == "threshold" ? SQZ_RULE_THRESHOLD : SQZ_RULE_BUDGET;
  if (out.selector == SQZ_SELECTOR_DENSE) return out;
  out.uniform_layers = options.layers == kUniformLayers ? 1 : 0;
  if (!options.layer_scales.empty()) {
    out.layer_scales = options.layer_scales.data();
    out.layer_scale_count = std::ssize(options.layer_scales);
  }
  if (options.keep) {
    out.keep = *options.keep;
  } else {
    out.budget = options.budget.value_or(kDefaultBudget);
  }
  return out;
}

}  // namespace sqz
