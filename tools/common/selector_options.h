// The selector options that every tool has. They decide what is read of the fixed context.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/status.h"
#include "formats/layers_file.h"
#include "formats/model_description.h"
#include "formats/sqz_file.h"
#include "sqz/sqz.hpp"

namespace sqz {

// The value of --layers that gives all layers the same budget, whatever the index embeds.
inline constexpr const char* kUniformLayers = "uniform";

struct SelectorOptions {
  std::string selector = "auto";  // the one that the index was built for
  std::optional<double> budget;   // none: kDefaultBudget, unless there is a keep
  std::optional<double> keep;     // of the clustered keys; no option of a tool
  int levels = 0;
  std::string rule;  // empty: budget
  int64_t block = 0;
  std::optional<int> dense_layers;  // none: the selector's own number
  std::string layers;  // a layer profile, or kUniformLayers; empty: what the index embeds
  // The contents of the profile, once load_layers() has read it.
  std::vector<double> layer_scales;
  std::optional<LayerBudgets> layer_budgets;
};

inline constexpr double kDefaultBudget = 0.125;

// `dense`: an option that excludes them all; may be null.
void add_selector_options(CLI::App& app, SelectorOptions& options, CLI::Option* dense = nullptr);

// The selectors of libruntime, by name, in the order of sqz_selector.
std::vector<std::string> selector_names();

// Returns the budgets of a profile of sqz-profile-layers. kMismatch, with the field that differs,
// if it is of another model; other errors are those of read_layers_file().
Result<LayerBudgets> read_layer_budgets(const std::string& path, const ModelDescription& model);

// Reads the profile that options.layers names, if it does.
Status load_layers(SelectorOptions& options, const ModelDescription& model);

// The result borrows options.layer_scales. options.selector is one of selector_names().
sqz_session_options session_options(const SelectorOptions& options, int threads);

}  // namespace sqz
