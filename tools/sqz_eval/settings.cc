#include "tools/sqz_eval/settings.h"

#include <algorithm>

namespace sqz::eval {
namespace {

Partition partition_of(const std::string& selector) {
  if (selector == "quest") return Partition::kPages;
  return selector == "saap" ? Partition::kBuckets : Partition::kKmeans;
}

// The purpose of the profile of --layers.
JsonText allocation_json(const LayerBudgets& budgets) {
  return {{"name", budgets.allocation},
          {"p", budgets.p},
          {"budget",
           static_cast<double>(budgets.uniform_budget) / static_cast<double>(budgets.context)}};
}

}  // namespace

std::string IndexKind::name() const {
  const std::string out = partition_name(partition);
  return rows == RowKind::k16 ? out : concat(out, "-", rows_name(rows));
}

BuildOptions index_options(const IndexKind& kind, const BuildOptions& base) {
  BuildOptions out = base;
  out.partition = kind.partition;
  out.compress.rows = kind.rows;
  if (kind.partition != Partition::kBuckets) out.qmodel = nullptr;
  // Only indexes of clusters serve the selectors that need these.
  if (kind.partition != Partition::kKmeans) out.heavy_hitters = false;
  return out;
}

JsonMembers to_json(const Setting& setting) {
  const SelectorOptions& options = setting.options;
  JsonMembers out = {{"selector", options.selector}, {"block", options.block}};
  if (setting.index.documents > 1) out["documents"] = setting.index.documents;
  if (setting.index.rows != RowKind::k16) out["rows"] = rows_name(setting.index.rows);
  if (setting.has_levels()) out["levels"] = options.levels;
  if (setting.has_levels()) out["rule"] = options.rule;
  if (!setting.dense()) out["layers"] = options.layers;
  if (options.layer_budgets) out["allocation"] = allocation_json(*options.layer_budgets);
  if (options.dense_layers) out["dense_layers"] = *options.dense_layers;
  return out;
}

std::vector<Setting> make_settings(const SettingOptions& o) {
  Setting dense;
  dense.options.selector = "dense";
  dense.options.block = o.block;
  std::vector<Setting> out = {dense};
  const auto add = [&](const Setting& setting) {
    const bool there = std::any_of(out.begin(), out.end(), [&](const Setting& other) {
      return other.options.budget == setting.options.budget && to_json(other) == to_json(setting);
    });
    if (!there) out.push_back(setting);
  };
  for (const std::string& selector : o.selectors) {
    for (const auto& rows : o.rows) {
      for (const int levels : o.levels) {
        for (const auto& rule : o.rules) {
          for (const double budget : o.budgets) {
            for (const auto& layers : o.layers) {
              if (selector == "dense") continue;
              Setting setting;
              setting.options.selector = selector;
              setting.options.block = o.block;
              setting.options.dense_layers = o.dense_layers;
              setting.options.budget = budget;
              setting.options.layers = layers;
              setting.index.partition = partition_of(selector);
              if (setting.has_levels()) setting.options.rule = rule;
              if (setting.has_levels()) setting.options.levels = levels;
              const bool clusters = setting.index.partition == Partition::kKmeans;
              if (clusters) setting.index.rows = rows_of(rows);
              add(setting);
            }
          }
        }
      }
    }
  }
  const std::vector<Setting> whole = out;
  for (const int documents : o.compose) {
    for (Setting setting : whole) {
      setting.index.documents = documents;
      add(setting);
    }
  }
  return out;
}

bool needs_selector(const std::vector<Setting>& settings, const std::string& name) {
  return std::any_of(settings.begin(), settings.end(),
                     [&](const Setting& setting) { return setting.options.selector == name; });
}

std::vector<IndexKind> index_kinds(const std::vector<Setting>& settings) {
  std::vector<IndexKind> out;
  for (const Setting& setting : settings) {
    if (std::find(out.begin(), out.end(), setting.index) == out.end()) out.push_back(setting.index);
  }
  return out;
}

}  // namespace sqz::eval
