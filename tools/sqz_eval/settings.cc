#include "tools/sqz_eval/settings.h"

#include <algorithm>

namespace sqz::eval {
namespace {

Partition partition_of(const std::string& selector) {
  if (selector == "quest") return Partition::kPages;
  return selector == "saap" ? Partition::kBuckets : Partition::kKmeans;
}

}  // namespace

std::string IndexKind::name() const {
  const std::string out = partition_name(partition);
  return rows == RowKind::k16 && key_codes == 0 ? out
                                                : concat(out, "-", rows_name(rows), "-", key_codes);
}

BuildOptions index_options(const IndexKind& kind, const BuildOptions& base) {
  BuildOptions out = base;
  out.partition = kind.partition;
  out.compress.rows = kind.rows;
  out.compress.key_codes = kind.key_codes;
  if (kind.partition != Partition::kBuckets) out.qmodel = nullptr;
  // Only indexes of clusters serve the selectors that need these.
  if (kind.partition != Partition::kKmeans) out.calibrate_keys = out.heavy_hitters = false;
  return out;
}

std::string Setting::coding() const {
  std::string out;
  if (index.rows != RowKind::k16) out += concat(" ", rows_name(index.rows));
  if (index.key_codes > 0) out += concat(out.empty() ? "" : ",", " codes ", index.key_codes);
  return out;
}

std::string Setting::text() const {
  std::string out = options.selector + coding();
  if (dense()) return out;
  out += concat(", budget ", *options.budget);
  if (has_levels()) out += concat(", levels ", options.levels);
  if (has_rule()) out += ", rule " + options.rule;
  if (options.layers != kUniformLayers) out += ", layers " + options.layers;
  if (options.dense_layers) out += concat(", dense layers ", *options.dense_layers);
  return out;
}

std::vector<Setting> make_settings(const SettingOptions& o) {
  Setting dense;
  dense.options.selector = "dense";
  std::vector<Setting> out = {dense};
  const auto add = [&](const Setting& setting) {
    const bool there = std::any_of(out.begin(), out.end(), [&](const Setting& other) {
      return other.text() == setting.text();
    });
    if (!there) out.push_back(setting);
  };
  for (const std::string& selector : o.selectors) {
    for (const auto& rows : o.rows) {
      for (const int codes : o.key_codes) {
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
                if (setting.has_rule()) setting.options.rule = rule;
                if (setting.has_levels()) setting.options.levels = levels;
                if (setting.has_levels()) setting.index.key_codes = codes;
                const bool clusters = setting.index.partition == Partition::kKmeans;
                if (clusters) setting.index.rows = rows_of(rows);
                add(setting);
              }
            }
          }
        }
      }
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
