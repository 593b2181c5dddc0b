#include "tools/sqz_eval/settings.h"

#include <algorithm>
#include <array>

namespace sqz::eval {
namespace {

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
}

}  // namespace

const SelectorTraits* find_selector(const std::string& name) {
  const auto* found =
      std::find_if(kSelectors.begin(), kSelectors.end(),
                   [&](const SelectorTraits& traits) { return name == traits.name; });
  return found == kSelectors.end() ? nullptr : found;
}

std::vector<std::string> known_selectors() {
  std::vector<std::string> out;
  for (const SelectorTraits& traits : kSelectors) out.emplace_back(traits.name);
  return out;
}

bool SelectorTraits::qmodel() const {
  return index == std::string_view(kBuckets) || index == std::string_view(kRoped);
}

std::string IndexKind::name() const {
  if (rows == RowKind::k16 && key_codes == 0) return partition;
  return concat(partition, "-", rows_name(rows), "-", key_codes);
}

BuildOptions index_options(const IndexKind& kind, const EvalBuildOptions& base) {
  BuildOptions out = base;
  if (kind.partition == kBuckets || kind.partition == kRoped) {
    if (kind.partition == kRoped) out.qmodel = base.roped;
    out.partition = Partition::kBuckets;
    out.calibrate_keys = out.heavy_hitters = false;
    return out;
  }
  out.qmodel = nullptr;  // the others have no use for it
  out.compress.rows = kind.rows;
  out.compress.key_codes = kind.key_codes;
  if (kind.partition == kPages) {
    out.partition = Partition::kPages;
    out.calibrate_keys = out.heavy_hitters = false;  // its selector needs neither
  }
  return out;
}

QmodelFile roped_qmodel(QmodelFile qmodel) {
  for (QmodelLayer& layer : qmodel.layers) layer.centroids = std::move(layer.roped_centroids);
  qmodel.has_roped_centroids = false;
  constexpr double kSlow =
      1e30;  // radians of all positions together are less than any number tells
  qmodel.model.rope = {};
  qmodel.model.rope.kind = RopeDescription::Kind::kLinear;
  qmodel.model.rope.factor = kSlow;
  return qmodel;
}

bool needs_qmodel(const std::vector<Setting>& settings) {
  return any(settings, [](const SelectorTraits& traits) { return traits.qmodel(); });
}

bool needs_roped(const std::vector<Setting>& settings) {
  return any(settings,
             [](const SelectorTraits& traits) { return traits.index == std::string_view(kRoped); });
}

bool needs_keys(const std::vector<Setting>& settings) {
  return any(settings, [](const SelectorTraits& traits) { return traits.keys; });
}

bool needs_heavy(const std::vector<Setting>& settings) {
  return any(settings, [](const SelectorTraits& traits) { return traits.heavy; });
}

std::string Setting::coding() const {
  std::string out;
  if (rows != RowKind::k16) out += concat(" ", rows_name(rows));
  if (key_codes > 0) out += concat(out.empty() ? "" : ",", " codes ", key_codes);
  return out;
}

std::string Setting::text() const {
  std::string out = options.selector + coding();
  if (traits->budget) out += concat(", budget ", *options.budget);
  if (traits->levels) out += concat(", levels ", options.levels);
  if (traits->rule) out += ", rule " + options.rule;
  if (traits->budget && options.layers != kUniformLayers) out += ", layers " + options.layers;
  if (options.dense_layers && !dense()) out += concat(", dense layers ", *options.dense_layers);
  return out;
}

Result<std::vector<Setting>> make_settings(const SettingOptions& options) {
  std::vector<Setting> out;
  add_settings(*find_selector("dense"), options, out);
  for (size_t i = 0; i < options.selectors.size(); ++i) {
    const std::string& name = options.selectors[i];
    const SelectorTraits* traits = find_selector(name);
    if (traits == nullptr) {
      return Status(Code::kInvalidArgument, concat("--selector: found ", name, ", expected one of ",
                                                   CLI::detail::join(known_selectors(), ", ")));
    }
    const auto end = options.selectors.begin() + static_cast<int64_t>(i);
    const bool again = std::find(options.selectors.begin(), end, name) != end;
    if (name != "dense" && !again) add_settings(*traits, options, out);
  }
  return out;
}

std::vector<IndexKind> index_kinds(const std::vector<Setting>& settings) {
  std::vector<IndexKind> out;
  for (const Setting& setting : settings) {
    const IndexKind kind = setting.index();
    if (std::find(out.begin(), out.end(), kind) == out.end()) out.push_back(kind);
  }
  return out;
}

}  // namespace sqz::eval
