#include "formats/sqz_metadata.h"

#include <algorithm>
#include <cmath>

#include "formats/json_fields.h"
#include "formats/metadata_strings.h"
#include "formats/sqz_container.h"

namespace sqz {
namespace {

constexpr int64_t kMaxTokens = int64_t{UINT32_MAX};  // positions are u32
constexpr int64_t kMaxWidth = int64_t{1} << 20;      // of buckets and hidden units

JsonText layers_to_json(const IndexMetadata& metadata) {
  std::vector<JsonText> out;
  for (const LayerPolicy& layer : metadata.layers) {
    JsonMembers members = {{"dense", layer.dense}, {"window", layer.window}};
    if (metadata.pruned) members["kept"] = layer.kept;
    out.push_back(members);
  }
  return out;
}

Result<std::vector<LayerPolicy>> layers_from_json(const JsonValue& json, bool pruned,
                                                  const std::string& label) {
  if (!json.is_array()) {
    return Status(Code::kCorrupt, concat(label, ": found ", found_text(json),
                                         ", expected an array of one object a layer"));
  }
  std::vector<LayerPolicy> layers;
  layers.reserve(json.size());
  for (const JsonValue& entry : json.items()) {
    JsonFields fields(entry, label);
    LayerPolicy layer;
    layer.dense = fields.boolean("dense");
    layer.window = fields.integer("window", 0, int64_t{1} << 40);
    if (pruned) layer.kept = fields.integer("kept", 0, kMaxTokens);
    if (!fields.status().ok()) return fields.status();
    layers.push_back(layer);
  }
  return layers;
}

// The array `key` of `json`, each entry taken by `take(entry)`, which gives an optional.
template <class T, class Take>
Result<std::vector<T>> array_of(const JsonValue& json, const char* key, const std::string& label,
                                const char* expected, Take take) {
  const JsonValue* array = json.find(key);
  if (array == nullptr || !array->is_array()) {
    return Status(Code::kCorrupt,
                  bad_field(label, key, array == nullptr ? "none" : found_text(*array),
                            "an array of one number a layer"));
  }
  std::vector<T> out;
  for (const JsonValue& entry : array->items()) {
    const auto value = take(entry);
    if (!value) {
      return Status(Code::kCorrupt, bad_field(label, concat(key, "[", out.size(), "]"),
                                              found_text(entry), expected));
    }
    out.push_back(*value);
  }
  return out;
}

Result<LayerBudgets> budgets_from_json(const JsonValue& json, const std::string& label) {
  JsonFields fields(json, label);
  LayerBudgets out;
  out.allocation = fields.text("allocation");
  out.context = fields.integer("context", 1, kMaxTokens);
  out.uniform_budget = fields.integer("uniform_budget", 1, kMaxTokens);
  out.p = fields.number("p", 0, 1);
  if (!fields.status().ok()) return fields.status();
  SQZ_ASSIGN_OR_RETURN(
      out.budget, array_of<int64_t>(json, "budget", label, "a number of keys",
                                    [](const JsonValue& x) { return x.integer(1, kMaxTokens); }));
  SQZ_ASSIGN_OR_RETURN(out.cosine,
                       array_of<double>(json, "cosine", label, "a number", [](const JsonValue& x) {
                         return x.is_number() ? std::optional(x.number()) : std::nullopt;
                       }));
  return out;
}

Status check_budgets(const LayerBudgets& b, int64_t layers, const std::string& label, Code code) {
  const auto refuse = [&](const std::string& field, const std::string& found,
                          const std::string& expected) {
    return Status(code, bad_field(label, concat("layer_budgets: ", field), found, expected));
  };
  if (b.allocation.empty()) return refuse("allocation", "none", "a name");
  if (b.uniform_budget < 1 || b.uniform_budget > b.context || b.context > kMaxTokens) {
    return refuse("uniform_budget", concat(b.uniform_budget),
                  concat("an integer in [1, ", b.context, "], the context"));
  }
  if (!(b.p > 0 && b.p <= 1)) return refuse("p", concat(b.p), "a number in (0, 1]");
  for (const auto& [field, size] :
       {std::pair("budget", b.budget.size()), std::pair("cosine", b.cosine.size())}) {
    if (std::cmp_equal(size, layers)) continue;
    return refuse(field, concat(size, " values"), concat(layers, ", one a layer"));
  }
  int64_t sum = 0;
  for (size_t l = 0; l < b.budget.size(); ++l) {
    if (b.budget[l] < 1 || b.budget[l] > b.context) {
      return refuse(concat("budget[", l, "]"), concat(b.budget[l]),
                    concat("an integer in [1, ", b.context, "], the context"));
    }
    if (!(std::abs(b.cosine[l]) <= 1)) {
      return refuse(concat("cosine[", l, "]"), concat(b.cosine[l]), "a number in [-1, 1]");
    }
    sum += b.budget[l];
  }
  if (sum == layers * b.uniform_budget) return {};
  return refuse("budget", concat("a sum of ", sum),
                concat(layers * b.uniform_budget, ", uniform_budget of every layer"));
}

// What holds of a pruned index beyond what holds of all.
Status check_pruned(const IndexMetadata& m, int64_t sparse, const std::string& label, Code code) {
  const auto refuse = [&](const char* field, const std::string& found,
                          const std::string& expected) {
    return Status(code, bad_field(label, field, found, expected));
  };
  const PrunedPolicy& policy = *m.pruned;
  const bool fits = !policy.selector.empty() && policy.budget > 0 && policy.budget <= 1 &&
                    policy.keep > 0 && policy.keep <= 1;
  if (!fits) {
    return refuse(
        "pruned",
        concat(in_quotes(policy.selector), ", budget ", policy.budget, ", keep ", policy.keep),
        "a selector and two numbers in (0, 1]");
  }
  if (sparse == 0) return refuse("partition", "pruned", "another: every layer is dense");
  if (m.levels != 0) return refuse("levels", concat(m.levels), "0: the index is pruned");
  if (!m.has_kv) return refuse("kv", "false", "true: the index is pruned");
  if (m.has_value_means) return refuse("value_means", "true", "false: the index is pruned");
  if (m.key_calibration) return refuse("key_calibration", "true", "false: the index is pruned");
  if (m.heavy_hitters) return refuse("heavy_hitters", "true", "false: the index is pruned");
  if (m.layer_budgets) return refuse("layer_budgets", "some", "none: the index is pruned");
  const int64_t most = m.tokens - m.sink - m.tail;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const LayerPolicy& layer = m.layers[l];
    if (layer.window < 0 || (layer.window > 0 && !layer.dense)) {
      return refuse("layers", concat("a window of ", layer.window, " in a sparse layer"),
                    "windows in dense layers only");
    }
    if (layer.dense ? layer.kept == 0 : layer.kept >= 1 && layer.kept <= most) continue;
    return refuse("layers", concat(layer.kept, " keys kept in layer ", l),
                  layer.dense ? "0: it is dense" : concat("1 to ", most));
  }
  return {};
}

}  // namespace

JsonText to_json(const LayerBudgets& budgets) {
  return {{"allocation", budgets.allocation},
          {"context", budgets.context},
          {"uniform_budget", budgets.uniform_budget},
          {"p", budgets.p},
          {"budget", budgets.budget},
          {"cosine", budgets.cosine}};
}

const char* partition_name(Partition partition) {
  switch (partition) {
    case Partition::kPages:
      return "pages";
    case Partition::kPruned:
      return "pruned";
    case Partition::kBuckets:
      return "buckets";
    case Partition::kKmeans:
      break;
  }
  return "kmeans";
}

Status check_metadata(const IndexMetadata& metadata, const std::string& label, Code code) {
  const auto refuse = [&](const char* field, const std::string& found,
                          const std::string& expected) {
    return Status(code, bad_field(label, field, found, expected));
  };
  const IndexMetadata& m = metadata;
  if (m.tokens < 1 || m.tokens > kMaxTokens) {
    return refuse("tokens", concat(m.tokens), concat("an integer in [1, ", kMaxTokens, "]"));
  }
  if (m.sink < 0 || m.sink > m.tokens) {
    return refuse("sink", concat(m.sink), concat("an integer in [0, ", m.tokens, "]"));
  }
  if (m.tail < 0 || m.tail > m.tokens - m.sink) {
    return refuse("tail", concat(m.tail),
                  concat("an integer in [0, ", m.tokens - m.sink, "], what the sink leaves"));
  }
  if (m.levels < 0 || m.levels > kMaxLevels) {
    return refuse("levels", concat(m.levels), concat("an integer in [0, ", kMaxLevels, "]"));
  }
  if (m.dtype != DType::kBF16 && m.dtype != DType::kF16) {
    return refuse("dtype", std::string(dtype_name(m.dtype)), "BF16 or F16");
  }
  if (!is_hash(m.tokens_hash)) {
    return refuse("tokens_hash", in_quotes(m.tokens_hash), "16 hexadecimal digits");
  }
  if (!m.tokenizer_hash.empty() && !is_hash(m.tokenizer_hash)) {
    return refuse("tokenizer_hash", in_quotes(m.tokenizer_hash), "16 hexadecimal digits or none");
  }
  if (m.layers.size() != static_cast<size_t>(m.model.layers)) {
    return refuse("layers", concat(m.layers.size(), " entries"),
                  concat(m.model.layers, ", as the model has"));
  }
  const auto sparse = std::count_if(m.layers.begin(), m.layers.end(),
                                    [](const LayerPolicy& layer) { return !layer.dense; });
  const bool pages = m.partition == Partition::kPages;
  if (pages ? m.page_size < 1 || m.page_size > kMaxPageSize : m.page_size != 0) {
    return refuse("page_size", concat(m.page_size),
                  pages ? concat("an integer in [1, ", kMaxPageSize, "]")
                        : "none: the partition is not pages");
  }
  const bool buckets = m.partition == Partition::kBuckets;
  for (const auto& [field, value, least] :
       {std::tuple("buckets", m.buckets, int64_t{2}), {"hidden", m.hidden, int64_t{1}}}) {
    if (buckets ? value >= least && value <= kMaxWidth : value == 0) continue;
    return refuse(field, concat(value),
                  buckets ? concat("an integer in [", least, ", ", kMaxWidth, "]")
                          : "none: the partition is not buckets");
  }
  const std::string partition = partition_name(m.partition);
  if ((pages || buckets) && m.levels != 0) {
    return refuse("levels", concat(m.levels), "0: the partition is " + partition);
  }
  if ((pages || buckets) && m.has_value_means) {
    return refuse("value_means", "true", "false: of " + partition);
  }
  const bool pruned = m.partition == Partition::kPruned;
  if (pruned != m.pruned.has_value()) {
    return refuse("pruned", pruned ? "none" : "a policy",
                  pruned ? "the policy that the index was pruned for" : "none: it is not pruned");
  }
  if (pruned) return check_pruned(m, sparse, label, code);
  if (!pages && !buckets && (m.levels > 0) != (sparse > 0)) {
    return refuse("levels", concat(m.levels),
                  sparse > 0 ? "at least 1: not every layer is dense" : "0: every layer is dense");
  }
  if (m.key_calibration && sparse == 0) {
    return refuse("key_calibration", "true", "false: every layer is dense");
  }
  if (m.heavy_hitters && sparse == 0) {
    return refuse("heavy_hitters", "true", "false: every layer is dense");
  }
  if (sparse > 0 && m.tokens - m.sink - m.tail < 1) {
    return refuse("tokens", concat(m.tokens), "more than sink and tail together");
  }
  for (const LayerPolicy& layer : m.layers) {
    if (layer.window < 0 || (layer.window > 0 && !layer.dense)) {
      return refuse("layers", concat("a window of ", layer.window, " in a sparse layer"),
                    "windows in dense layers only");
    }
  }
  if (m.layer_budgets) return check_budgets(*m.layer_budgets, m.model.layers, label, code);
  return {};
}

std::map<std::string, std::string> metadata_to_strings(const IndexMetadata& metadata) {
  std::map<std::string, std::string> out = {
      {"format", "sqz"},
      {"format_version", std::to_string(kFormatVersion)},
      {"kind", kind_name(FileKind::kIndex)},
      {"producer", metadata.producer},
      {"model", to_json(metadata.model).str()},
      {"tokenizer_hash", metadata.tokenizer_hash},
      {"tokens_hash", metadata.tokens_hash},
      {"tokens", std::to_string(metadata.tokens)},
      {"sink", std::to_string(metadata.sink)},
      {"tail", std::to_string(metadata.tail)},
      {"partition", partition_name(metadata.partition)},
      {"levels", std::to_string(metadata.levels)},
      {"dtype", std::string(dtype_name(metadata.dtype))},
      {"kv", metadata.has_kv ? "true" : "false"},
      {"value_means", metadata.has_value_means ? "true" : "false"},
      {"layers", layers_to_json(metadata).str()},
      {"build", metadata.build.str()}};
  if (metadata.partition == Partition::kPages) {
    out["page_size"] = std::to_string(metadata.page_size);
  }
  if (metadata.partition == Partition::kBuckets) {
    out["buckets"] = std::to_string(metadata.buckets);
    out["hidden"] = std::to_string(metadata.hidden);
    out[kLogitsKey] = kLogitsOfKeys;
  }
  if (metadata.key_calibration) out["key_calibration"] = "true";
  if (metadata.pruned) {
    const PrunedPolicy& pruned = *metadata.pruned;
    out["pruned"] =
        JsonText({{"selector", pruned.selector}, {"budget", pruned.budget}, {"keep", pruned.keep}})
            .str();
  }
  if (metadata.heavy_hitters) out["heavy_hitters"] = "true";
  if (metadata.layer_budgets) {
    out["layer_budgets"] = to_json(*metadata.layer_budgets).str();
  }
  return out;
}

Result<IndexMetadata> metadata_from_strings(const std::map<std::string, std::string>& strings,
                                            const std::string& path) {
  MetadataStrings in(strings, path);
  IndexMetadata metadata;
  metadata.producer = in.string("producer");
  metadata.tokenizer_hash = in.string("tokenizer_hash");
  metadata.tokens_hash = in.string("tokens_hash");
  metadata.tokens = in.integer("tokens", 1, kMaxTokens);
  metadata.sink = in.integer("sink", 0, kMaxTokens);
  metadata.tail = in.integer("tail", 0, kMaxTokens);
  metadata.levels = static_cast<int>(in.integer("levels", 0, kMaxLevels));
  metadata.has_kv = in.boolean("kv");
  metadata.has_value_means = in.boolean("value_means");
  metadata.build = JsonText(in.json("build").root());
  const std::string partition = in.string("partition"), dtype = in.string("dtype");
  const JsonDocument model = in.json("model"), layers = in.json("layers");
  if (partition == partition_name(Partition::kPages)) {
    metadata.partition = Partition::kPages;
    metadata.page_size = in.integer("page_size", 1, kMaxPageSize);
  } else if (partition == partition_name(Partition::kPruned)) {
    metadata.partition = Partition::kPruned;
  } else if (partition == partition_name(Partition::kBuckets)) {
    metadata.partition = Partition::kBuckets;
    metadata.buckets = in.integer("buckets", 2, kMaxWidth);
    metadata.hidden = in.integer("hidden", 1, kMaxWidth);
    check_logits(in, "train the query classifier again and build the index with it");
  } else if (partition != partition_name(Partition::kKmeans)) {
    in.fail(bad_field(path, "__metadata__: partition", in_quotes(partition),
                      "\"kmeans\", \"pages\", \"pruned\" or \"buckets\""));
  }
  if (strings.contains("key_calibration")) metadata.key_calibration = in.boolean("key_calibration");
  const auto known = dtype_from_name(dtype);
  if (known) {
    metadata.dtype = *known;
  } else {
    in.fail(bad_field(path, "__metadata__: dtype", in_quotes(dtype), "BF16 or F16"));
  }
  if (!in.status().ok()) return in.status();
  SQZ_ASSIGN_OR_RETURN(metadata.model, model_from_json(model.root(), in.label("model")));
  SQZ_ASSIGN_OR_RETURN(metadata.layers,
                       layers_from_json(layers.root(), metadata.partition == Partition::kPruned,
                                        in.label("layers")));
  if (strings.contains("heavy_hitters")) metadata.heavy_hitters = in.boolean("heavy_hitters");
  if (metadata.partition == Partition::kPruned) {
    const JsonDocument pruned = in.json("pruned");
    if (!in.status().ok()) return in.status();
    JsonFields fields(pruned.root(), in.label("pruned"));
    metadata.pruned = {.selector = fields.text("selector"),
                       .budget = fields.number("budget", 0, 1),
                       .keep = fields.number("keep", 0, 1)};
    if (!fields.status().ok()) return fields.status();
  }
  if (strings.contains("layer_budgets")) {
    const JsonDocument budgets = in.json("layer_budgets");
    if (!in.status().ok()) return in.status();
    SQZ_ASSIGN_OR_RETURN(metadata.layer_budgets,
                         budgets_from_json(budgets.root(), in.label("layer_budgets")));
  }
  SQZ_RETURN_IF_ERROR(check_metadata(metadata, path + ": __metadata__", Code::kCorrupt));
  return metadata;
}

}  // namespace sqz
