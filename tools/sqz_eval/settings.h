// The selector settings that one run compares: the cross product of the options.
#pragma once

#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/common/selector_options.h"

namespace sqz::eval {

// An index with rows of codes is compressed from the one without.
struct IndexKind {
  Partition partition = Partition::kKmeans;
  RowKind rows = RowKind::k16;
  int documents = 1;  // the context is cut into so many, and each has an index of its own

  std::string name() const;  // "kmeans", "kmeans-q8": part of the name of its file
  bool operator==(const IndexKind&) const = default;
};

// How the index of a kind is built, on top of `base`.
BuildOptions index_options(const IndexKind& kind, const BuildOptions& base);

struct SettingOptions {
  std::vector<std::string> selectors = {"dense", "squeezed"};
  std::vector<double> budgets = {kDefaultBudget};
  std::vector<int> levels = {0};
  std::vector<std::string> rules = {"budget"};
  std::vector<std::string> rows = {"bf16"};
  std::vector<int> compose;  // beside the whole context, documents that were made apart
  int64_t block = 0;
  std::optional<int> dense_layers;
  std::vector<std::string> layers = {kUniformLayers};  // profiles of layers to compare
};

// Options that the selector does not take have their defaults.
struct Setting {
  SelectorOptions options;
  IndexKind index;

  bool dense() const { return options.selector == "dense"; }
  bool has_levels() const { return options.selector == "squeezed"; }
};

// The options as fields of a row.
JsonMembers to_json(const Setting& setting);

// Always begins with dense, the reference. No setting is there twice.
std::vector<Setting> make_settings(const SettingOptions& options);

bool needs_selector(const std::vector<Setting>& settings, const std::string& name);

// The kinds of index that the settings need, without repetition; that of dense is the first.
std::vector<IndexKind> index_kinds(const std::vector<Setting>& settings);

}  // namespace sqz::eval
