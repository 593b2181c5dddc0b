#include "tools/sqz_eval/settings.h"

#include <algorithm>

namespace sqz::eval {
namespace {

<<<<<<< HEAD
constexpr const char* kKmeans = "kmeans";
constexpr const char* kPages = "pages";
constexpr const char* kBuckets = "buckets";
constexpr const char* kRoped = "roped-buckets";

constexpr std::array kSelectors = {
    SelectorTraits{.name = "dense", .served = "dense", .index = kKmeans, .budget = false},
    SelectorTraits{.name = "squeezed",
                   .served = "squeezed",
                   .index = kKmeans,
                   .levels = true,
                   .rule = true,
                   .rows = true,
                   .codes = true},
    SelectorTraits{.name = "quest", .served = "quest", .index = kPages},
    SelectorTraits{.name = "ideal",
                   .served = "ideal",
                   .index = kKmeans,
                   .rule = true,
                   .keys = true,
                   .rows = true},
    SelectorTraits{.name = "stream", .served = "stream", .index = kKmeans, .rows = true},
    SelectorTraits{.name = "window", .served = "window", .index = kKmeans, .rows = true},
    SelectorTraits{.name = "h2o", .served = "h2o", .index = kKmeans, .heavy = true, .rows = true},
    SelectorTraits{.name = "saap", .served = "saap", .index = kBuckets},
};

// Whether one of the settings has a selector with this trait.
template <class Trait>
bool any(const std::vector<Setting>& settings, const Trait& trait) {
  return std::any_of(settings.begin(), settings.end(),
                     [&](const Setting& setting) { return trait(*setting.traits); });
}

// The values given, or the default alone where a selector does not take the option.
template <class T>
std::vector<T> taken(bool takes, const std::vector<T>& values, const T& standard) {
  return takes ? values : std::vector<T>{standard};
}

// How much to read, and for how many layers alike.
void add_amounts(const SettingOptions& options, Setting setting, std::vector<Setting>& out) {
  const SelectorTraits& traits = *setting.traits;
  for (const double budget : taken(traits.budget, options.budgets, 1.0)) {
    if (traits.budget) setting.options.budget = budget;
    for (const auto& layers : taken(traits.budget, options.layers, SelectorOptions().layers)) {
      setting.options.layers = layers;
      out.push_back(setting);
    }
  }
}

void add_settings(const SelectorTraits& traits, const SettingOptions& options, const Setting& coded,
                  std::vector<Setting>& out) {
  const SelectorOptions standard;
  Setting setting = coded;
  setting.approximates = setting.key_codes > 0 && !options.gpu;
  setting.options.selector = traits.name;
  setting.options.block = options.block;
  setting.options.dense_layers = options.dense_layers;
  for (const int levels : taken(traits.levels, options.levels, standard.levels)) {
    setting.options.levels = levels;
    for (const auto& rule : taken(traits.rule, options.rules, standard.rule)) {
      setting.options.rule = rule;
      add_amounts(options, setting, out);
    }
  }
}

// Of every kind of rows.
void add_settings(const SelectorTraits& traits, const SettingOptions& options,
                  std::vector<Setting>& out) {
  for (const auto& rows : taken(traits.rows, options.rows, std::string("bf16"))) {
    for (const int codes : taken(traits.codes, options.key_codes, 0)) {
      Setting setting{&traits, SelectorOptions()};
      setting.rows = rows_of(rows);
      setting.key_codes = codes;
      add_settings(traits, options, setting, out);
    }
  }
=======
Partition partition_of(const std::string& selector) {
  if (selector == "quest") return Partition::kPages;
  return selector == "saap" ? Partition::kBuckets : Partition::kKmeans;
>>>>>>> 6ac341a (A layer profile is a JSON file with p = 0.35, the paper's, by default; --sweep and --p auto go. sqz-eval measures needle1, loss, error and recall; what it shares with sqz-profile-layers is in tools/common)
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
<<<<<<< HEAD
  if (traits->budget) out += concat(", budget ", *options.budget);
  if (traits->levels) out += concat(", levels ", options.levels);
  if (traits->rule) out += ", rule " + options.rule;
  if (traits->budget && options.layers != kUniformLayers) out += ", layers " + options.layers;
  if (options.dense_layers && !dense()) out += concat(", dense layers ", *options.dense_layers);
=======
  if (dense()) return out;
  out += concat(", budget ", *options.budget);
  if (has_levels()) out += concat(", levels ", options.levels);
  if (has_rule()) out += ", rule " + options.rule;
  if (options.layers != kUniformLayers) out += ", layers " + options.layers;
  if (options.dense_layers) out += concat(", dense layers ", *options.dense_layers);
>>>>>>> 6ac341a (A layer profile is a JSON file with p = 0.35, the paper's, by default; --sweep and --p auto go. sqz-eval measures needle1, loss, error and recall; what it shares with sqz-profile-layers is in tools/common)
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
