#include "formats/sqz_metadata.h"

#include <algorithm>
#include <numeric>

#include "formats/base/hash.h"

namespace sqz {
namespace {

constexpr int64_t kMaxTokens = int64_t{UINT32_MAX};  // positions are u32
constexpr int64_t kMaxBuckets = int64_t{1} << 20;    // of buckets and hidden units

constexpr int64_t kVersionOfCodes = 2;  // earlier readers do not know their tensors
constexpr const char* kPartitions[] = {"kmeans", "pages", "pruned", "buckets"};

Result<std::vector<LayerPolicy>> layers_from_json(const JsonValue& json, bool pruned,
                                                  const std::string& label) {
  if (!json.is_array()) return unexpected(json, label, "an array of one object a layer");
  std::vector<LayerPolicy> layers;
  layers.reserve(json.size());
  for (const JsonValue& entry : json.items()) {
    JsonFields fields(entry, label);
    layers.push_back({.dense = fields.boolean("dense"),
                      .window = fields.integer("window", 0, int64_t{1} << 40),
                      .kept = pruned ? fields.integer("kept", 0, kMaxTokens) : 0,
                      .rows16 = fields.has("rows")});
    if (fields.has("rows") && fields.text("rows") != rows_name(RowKind::k16)) {
      fields.complain("rows", in_quotes(rows_name(RowKind::k16)));
    }
    SQZ_RETURN_IF_ERROR(fields.status());
  }
  return layers;
}

// A number in (0, 1].
double share_of(JsonFields& in, const char* key) {
  const double share = in.number(key, 0, 1);
  if (share == 0) in.complain(key, "a number in (0, 1]");
  return share;
}

Result<PrunedPolicy> pruned_from_json(const JsonValue& json, const std::string& label) {
  JsonFields in(json, label);
  PrunedPolicy out{in.text("selector"), share_of(in, "budget"), share_of(in, "keep")};
  if (out.selector.empty()) in.complain("selector", "a name");
  SQZ_RETURN_IF_ERROR(in.status());
  return out;
}

// The fields of a layer against the others.
void check_layer(const IndexMetadata& m, size_t l, JsonFields& in) {
  const LayerPolicy& layer = m.layers[l];
  const auto must = [&](bool right, const char* field, int64_t found, const std::string& expected) {
    if (!right) in.complain_of(concat("layers[", l, "].", field), concat(found), expected);
  };
  const int64_t window = m.model.sliding_window[l];
  must(layer.window == window, "window", layer.window,
       concat(window, ", the model's sliding window"));
  must(layer.window == 0 || layer.dense, "window", layer.window, "0: the layer is not dense");
  must(layer.dense || m.model.may_select(static_cast<int64_t>(l)), "dense", 0,
       "true: the layer is not a full one with the model's heads, head_dim and scale");
  must(!layer.rows16 || m.rows != RowKind::k16, "rows", 16, "none: all rows have 16 bits");
  if (!m.pruned) return;
  const int64_t most = m.tokens - m.sink - m.tail;
  must(layer.dense ? layer.kept == 0 : layer.kept >= 1 && layer.kept <= most, "kept", layer.kept,
       layer.dense ? "0: the layer is dense" : concat("1 to ", most));
}

// The fields against each other.
void check_fields(const IndexMetadata& m, JsonFields& in) {
  const auto must = [&](bool right, const char* key, const std::string& expected) {
    if (!right) in.complain(key, expected);
  };
  const bool kmeans = m.partition == Partition::kKmeans, pruned = m.pruned.has_value();
  const bool all_dense = std::all_of(m.layers.begin(), m.layers.end(),
                                     [](const LayerPolicy& layer) { return layer.dense; });
  must(m.sink <= m.tokens, "sink", concat("at most ", m.tokens, ", the tokens"));
  must(m.tail <= m.tokens - m.sink, "tail",
       concat("at most ", m.tokens - m.sink, ", what the sink leaves"));
  must(all_dense || m.sink + m.tail < m.tokens, "tokens", "more than sink and tail together");
  must(std::ssize(m.layers) == m.model.layers, "layers",
       concat("an array of ", m.model.layers, ", as the model has layers"));
  must(!pruned || !all_dense, "partition", "another: every layer is dense");
  const bool clusters = kmeans && !all_dense;
  must((m.levels > 0) == clusters, "levels",
       clusters ? "at least 1: not every layer is dense"
                : "0: every layer is dense, or the partition is not kmeans");
  must(kmeans || !m.has_value_means, "value_means", "false: the partition is not kmeans");
  must(!m.heavy_hitters || !(all_dense || pruned), "heavy_hitters",
       "false: every layer is dense, or the index is pruned");
  must(!pruned || !m.layer_budgets, "layer_budgets", "none: the index is pruned");
  must(m.partition != Partition::kBuckets || m.model.rope.is_whole(), "partition",
       "another: a classifier looks at queries before RoPE, of which the model's is not described");
  // Rows of codes stand on clusters and their means.
  must(!m.has_codes() || clusters, "partition", "kmeans, with clusters: the index has codes");
  must(!m.has_codes() || m.has_value_means, "value_means", "true: the index has codes");
  must(!m.has_codes() || m.version >= kVersionOfCodes, "format_version",
       concat("at least ", kVersionOfCodes, ": the index has codes"));
  must(m.model.geometry.empty() || m.version >= kVersionOfLayers, "format_version",
       concat("at least ", kVersionOfLayers, ": the layers differ in geometry"));
  if (!in.status().ok()) return;
  for (size_t l = 0; l < m.layers.size(); ++l) check_layer(m, l, in);
}

}  // namespace

Result<std::vector<std::string>> context_ids_from_json(const JsonValue& json,
                                                       const std::string& label) {
  const char* expected = "an array of 1 to 7 ids of 16 hexadecimal digits";
  if (!json.is_array() || json.size() == 0 || json.size() > kMostInFront)
    return unexpected(json, label, expected);
  std::vector<std::string> out;
  for (const JsonValue& entry : json.items()) {
    if (!entry.is_string() || !is_hash(std::string(entry.string())))
      return unexpected(entry, label, expected);
    out.emplace_back(entry.string());
  }
  return out;
}

JsonText to_json(const LayerBudgets& budgets) {
  return {{"allocation", budgets.allocation},
          {"context", budgets.context},
          {"uniform_budget", budgets.uniform_budget},
          {"p", budgets.p},
          {"budget", budgets.budget},
          {"cosine", budgets.cosine}};
}

LayerBudgets read_budgets(JsonFields& in, int64_t layers) {
  LayerBudgets out;
  out.allocation = in.text("allocation");
  if (out.allocation.empty()) in.complain("allocation", "a name");
  out.context = in.integer("context", 1, kMaxTokens);
  out.uniform_budget = in.integer("uniform_budget", 1, out.context);
  out.p = share_of(in, "p");
  out.budget = in.integers("budget", 1, out.context);
  out.cosine = in.numbers("cosine", -1, 1);
  for (const auto& [key, size] :
       {std::pair("budget", out.budget.size()), std::pair("cosine", out.cosine.size())}) {
    if (std::cmp_not_equal(size, layers)) in.complain(key, concat(layers, ", one a layer"));
  }
  const auto sum = std::accumulate(out.budget.begin(), out.budget.end(), int64_t{0});
  if (sum != layers * out.uniform_budget) {
    in.complain_of("budget", concat("a sum of ", sum),
                   concat(layers * out.uniform_budget, ", uniform_budget of every layer"));
  }
  return out;
}

std::string IndexMetadata::context_id() const {
  if (after.empty()) return tokens_hash;
  std::string text = tokens_hash;
  for (const std::string& id : after) text += "," + id;
  return hex(xxh3_64(std::as_bytes(std::span(text))));
}

const char* partition_name(Partition partition) {
  return kPartitions[static_cast<size_t>(partition)];
}

std::string build_id(std::map<std::string, std::string> metadata, const std::string& source) {
  metadata.erase(kChecksumsKey);
  metadata.erase(kCalibrationKey);
  if (source != kTailSource && !source.empty()) metadata[kCalibrationKey] = source;
  const std::string text = JsonText(metadata).str();
  return hex(xxh3_64(std::as_bytes(std::span(text))));
}

Status check_same_build(std::map<std::string, std::string> found,
                        std::map<std::string, std::string> expected, const std::string& path) {
  for (auto* metadata : {&found, &expected}) metadata->erase(kCalibrationKey);
  SQZ_ASSIGN_OR_RETURN(const JsonDocument theirs, metadata_json(found, path));
  SQZ_ASSIGN_OR_RETURN(const JsonDocument ours, metadata_json(expected, path));
  const auto difference = first_difference(&theirs.root(), &ours.root());
  if (!difference) return {};
  return {Code::kMismatch, bad_field(path, difference->name, difference->left, difference->right)};
}

Result<IndexMetadata> read_metadata(JsonFields in) {
  IndexMetadata m;
  m.version = in.integer("format_version", 1, kVersionOfLayers);
  m.tokens_hash = in.text("tokens_hash");
  if (!is_hash(m.tokens_hash)) in.complain("tokens_hash", "16 hexadecimal digits");
  m.tokens = in.integer("tokens", 1, kMaxTokens);
  m.sink = in.integer("sink", 0, kMaxTokens);
  m.tail = in.integer("tail", 0, kMaxTokens);
  m.levels = static_cast<int>(in.integer("levels", 0, kMaxLevels));
  if (!in.boolean("kv", true)) {
    in.complain("kv", "true: build the index again, keys and values are stored now");
  }
  m.has_value_means = in.boolean("value_means");
  const auto known =
      std::find(std::begin(kPartitions), std::end(kPartitions), in.text("partition"));
  if (known == std::end(kPartitions)) {
    in.complain("partition", "kmeans, pages, pruned or buckets");
  } else {
    m.partition = static_cast<Partition>(known - std::begin(kPartitions));
  }
  const bool pruned = m.partition == Partition::kPruned;
  if (m.partition == Partition::kPages) m.page_size = in.integer("page_size", 1, kMaxPageSize);
  if (m.partition == Partition::kBuckets) {
    m.buckets = in.integer("buckets", 2, kMaxBuckets);
    m.hidden = in.integer("hidden", 1, kMaxBuckets);
    check_logits(in, "train the query classifier again and build the index with it");
  }
  const auto dtype = dtype_from_name(in.text("dtype"));
  if (dtype != DType::kBF16 && dtype != DType::kF16) in.complain("dtype", "BF16 or F16");
  m.dtype = dtype.value_or(DType::kBF16);
  read_origin(in, m);
  in.parse("layers", m.layers, [&](const JsonValue& json, const std::string& label) {
    return layers_from_json(json, pruned, label);
  });
  if (in.has("rows")) {
    m.rows = RowKind::kQ8;
    if (in.text("rows") != rows_name(m.rows)) {
      in.complain("rows", "\"q8\": build the index again with --rows q8");
    }
  }
  m.heavy_hitters = in.boolean("heavy_hitters", false);
  if (pruned) in.parse("pruned", m.pruned, pruned_from_json);
  for (const auto& [key, text] : {std::pair("build", &m.build), std::pair("chat", &m.chat)}) {
    if (text == &m.chat && !in.has(key)) continue;
    const JsonValue* json = in.value(key);
    if (json != nullptr && json->is_object()) {
      *text = JsonText(*json);
    } else {
      in.complain(key, "an object");
    }
  }
  if (in.has("after")) in.parse("after", m.after, context_ids_from_json);
  if (in.has("layer_budgets")) {
    JsonFields budgets = in.object("layer_budgets");
    m.layer_budgets = read_budgets(budgets, m.model.layers);
    in.complain_of(budgets.status());
  }
  if (in.status().ok()) check_fields(m, in);
  SQZ_RETURN_IF_ERROR(in.status());
  return m;
}

}  // namespace sqz
