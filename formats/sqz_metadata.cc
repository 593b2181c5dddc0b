#include "formats/sqz_metadata.h"

#include <algorithm>
#include <cmath>

#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "formats/metadata_strings.h"
#include "formats/sqz_container.h"

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

Result<PrunedPolicy> pruned_from_json(const JsonValue& json, const std::string& label) {
  JsonFields fields(json, label);
  PrunedPolicy out{.selector = fields.text("selector"),
                   .budget = fields.number("budget", 0, 1),
                   .keep = fields.number("keep", 0, 1)};
  if (!fields.status().ok()) return fields.status();
  return out;
}

// Each layer has the model's sliding window, and a layer that has one is dense.
Status check_windows(const IndexMetadata& m, const Refuse& refuse) {
  const std::vector<int64_t>& windows = m.model.sliding_window;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const int64_t window = l < windows.size() ? windows[l] : 0, found = m.layers[l].window;
    if (found == window && (found == 0 || m.layers[l].dense)) continue;
    return refuse(concat("layers[", l, "].window"), found,
                  found == window ? "0: the layer is not dense"
                                  : concat(window, ", the model's sliding window"));
  }
  return {};
}

// What holds of a pruned index beyond what holds of all.
Status check_pruned(const IndexMetadata& m, bool all_dense, const Refuse& refuse) {
  const PrunedPolicy& policy = *m.pruned;
  const bool fits = !policy.selector.empty() && policy.budget > 0 && policy.budget <= 1 &&
                    policy.keep > 0 && policy.keep <= 1;
  if (!fits) {
    return refuse(
        "pruned",
        concat(in_quotes(policy.selector), ", budget ", policy.budget, ", keep ", policy.keep),
        "a selector and two numbers in (0, 1]");
  }
  if (all_dense) return refuse("partition", "pruned", "another: every layer is dense");
  struct Field {
    const char* name;
    bool wrong;
    std::string found;
    const char* expected;
  };
  for (const Field& field : {Field{"levels", m.levels != 0, concat(m.levels), "0"},
                             Field{"value_means", m.has_value_means, "true", "false"},
                             Field{"key_calibration", m.key_calibration, "true", "false"},
                             Field{"heavy_hitters", m.heavy_hitters, "true", "false"},
                             Field{"layer_budgets", m.layer_budgets.has_value(), "some", "none"}}) {
    if (!field.wrong) continue;
    return refuse(field.name, field.found, concat(field.expected, ": the index is pruned"));
  }
  SQZ_RETURN_IF_ERROR(check_windows(m, refuse));
  const int64_t most = m.tokens - m.sink - m.tail;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const LayerPolicy& layer = m.layers[l];
    if (layer.dense ? layer.kept == 0 : layer.kept >= 1 && layer.kept <= most) continue;
    return refuse("layers", concat(layer.kept, " keys kept in layer ", l),
                  layer.dense ? "0: it is dense" : concat("1 to ", most));
  }
  return {};
}

// Rows of codes stand on clusters and their means.
Status check_codes(const IndexMetadata& m, const Refuse& refuse) {
  for (const LayerPolicy& layer : m.layers) {
    if (layer.rows16 && m.rows == RowKind::k16) {
      return refuse("layers", "a layer with rows of 16 bits", "none: all rows have 16 bits");
    }
  }
  if (m.key_codes < 0 || m.key_codes > 2) return refuse("key_codes", m.key_codes, "0, 1 or 2");
  if (!m.has_codes()) return {};
  const std::string what = m.rows == RowKind::k16 ? concat(m.key_codes, " bits of key codes")
                                                  : concat("rows of ", rows_name(m.rows));
  if (m.partition != Partition::kKmeans || m.levels == 0) {
    return refuse("partition", partition_name(m.partition),
                  "kmeans, with a layer that has clusters: the index has " + what);
  }
  if (m.has_value_means) return {};
  return refuse("value_means", "false", "true: the index has " + what);
}

// The fields that one partition has and the others do not.
Status check_partition(const IndexMetadata& m, const Refuse& refuse) {
  struct Field {
    const char* name;
    int64_t value, low, high;
    Partition owner;
  };
  for (const Field& f : {Field{"page_size", m.page_size, 1, kMaxPageSize, Partition::kPages},
                         Field{"buckets", m.buckets, 2, kMaxBuckets, Partition::kBuckets},
                         Field{"hidden", m.hidden, 1, kMaxBuckets, Partition::kBuckets}}) {
    if (m.partition == f.owner) {
      SQZ_RETURN_IF_ERROR(check_range(refuse, f.name, f.value, f.low, f.high));
    } else if (f.value != 0) {
      return refuse(f.name, f.value,
                    concat("none: the partition is not ", partition_name(f.owner)));
    }
  }
  if (m.partition == Partition::kPages || m.partition == Partition::kBuckets) {
    const std::string partition = partition_name(m.partition);
    if (m.levels != 0) return refuse("levels", m.levels, "0: the partition is " + partition);
    if (m.has_value_means) return refuse("value_means", "true", "false: of " + partition);
  }
  if (m.partition == Partition::kPruned && !m.pruned) {
    return refuse("pruned", "none", "the policy that the index was pruned for");
  }
  if (m.partition == Partition::kPruned || !m.pruned) return {};
  return refuse("pruned", "a policy", "none: it is not pruned");
}

void read_codes(MetadataStrings& in, IndexMetadata& m) {
  if (in.has("rows")) {
    const std::string rows = in.string("rows");
    m.rows = RowKind::kQ8;
    if (rows != rows_name(m.rows)) {
      in.fail("rows", in_quotes(rows), "\"q8\": build the index again with --rows q8");
    }
  }
  if (in.has("key_codes")) m.key_codes = static_cast<int>(in.integer("key_codes", 1, 2));
  if (m.has_rotation()) {
    m.rotation_seed = static_cast<uint64_t>(in.integer("rotation_seed", 0, INT64_MAX));
  }
  m.version = in.integer("format_version", 1, kFormatVersion);
  if (m.has_codes() && m.version < kVersionOfCodes) {
    in.fail("format_version", concat(m.version),
            concat("at least ", kVersionOfCodes, ": the index has rows of codes"));
  }
}

// The metadata by names that a message can say: "build.seed", "sink".
JsonMembers settings_of(const std::map<std::string, std::string>& metadata) {
  JsonMembers out;
  for (const auto& [key, text] : metadata) {
    if (key == kChecksumsKey || key == kCalibrationKey) continue;
    const auto json = parse_json(text, key);
    if (!json.ok() || !json->root().is_object()) {
      out[key] = text;
      continue;
    }
    for (const JsonValue& member : json->root().items())
      out[concat(key, ".", member.key())] = JsonText(member);
  }
  return out;
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

Result<LayerBudgets> budgets_from_json(const JsonValue& json, const std::string& label) {
  JsonFields fields(json, label);
  LayerBudgets out;
  out.allocation = fields.text("allocation");
  out.context = fields.integer("context", 1, kMaxTokens);
  out.uniform_budget = fields.integer("uniform_budget", 1, kMaxTokens);
  out.p = fields.number("p", 0, 1);
  out.budget = fields.integers("budget", 1, kMaxTokens);
  out.cosine = fields.numbers("cosine", -1, 1);
  if (!fields.status().ok()) return fields.status();
  return out;
}

Status check_budgets(const LayerBudgets& b, int64_t layers, const Refuse& refuse) {
  const std::string in_context = concat("an integer in [1, ", b.context, "], the context");
  if (b.allocation.empty()) return refuse("allocation", "none", "a name");
  if (b.uniform_budget < 1 || b.uniform_budget > b.context || b.context > kMaxTokens) {
    return refuse("uniform_budget", b.uniform_budget, in_context);
  }
  if (!(b.p > 0 && b.p <= 1)) return refuse("p", b.p, "a number in (0, 1]");
  for (const auto& [field, size] :
       {std::pair("budget", b.budget.size()), std::pair("cosine", b.cosine.size())}) {
    if (std::cmp_equal(size, layers)) continue;
    return refuse(field, concat(size, " values"), concat(layers, ", one a layer"));
  }
  int64_t sum = 0;
  for (size_t l = 0; l < b.budget.size(); ++l) {
    if (b.budget[l] < 1 || b.budget[l] > b.context) {
      return refuse(concat("budget[", l, "]"), b.budget[l], in_context);
    }
    if (!(std::abs(b.cosine[l]) <= 1)) {
      return refuse(concat("cosine[", l, "]"), b.cosine[l], "a number in [-1, 1]");
    }
    sum += b.budget[l];
  }
  if (sum == layers * b.uniform_budget) return {};
  return refuse("budget", concat("a sum of ", sum),
                concat(layers * b.uniform_budget, ", uniform_budget of every layer"));
}

const char* partition_name(Partition partition) {
  return kPartitions[static_cast<size_t>(partition)];
}

Status check_metadata(const IndexMetadata& m, const std::string& label, Code code) {
  const Refuse refuse{label, code};
  SQZ_RETURN_IF_ERROR(check_range(refuse, "tokens", m.tokens, 1, kMaxTokens));
  SQZ_RETURN_IF_ERROR(check_range(refuse, "sink", m.sink, 0, m.tokens));
  SQZ_RETURN_IF_ERROR(
      check_range(refuse, "tail", m.tail, 0, m.tokens - m.sink, ", what the sink leaves"));
  SQZ_RETURN_IF_ERROR(check_range(refuse, "levels", m.levels, 0, kMaxLevels));
  if (m.dtype != DType::kBF16 && m.dtype != DType::kF16) {
    return refuse("dtype", dtype_name(m.dtype), "BF16 or F16");
  }
  if (!is_hash(m.tokens_hash)) {
    return refuse("tokens_hash", in_quotes(m.tokens_hash), "16 hexadecimal digits");
  }
  SQZ_RETURN_IF_ERROR(check_tokenizer_hash(refuse, m.tokenizer_hash));
  if (std::ssize(m.layers) != m.model.layers) {
    return refuse("layers", concat(m.layers.size(), " entries"),
                  concat(m.model.layers, ", as the model has"));
  }
  SQZ_RETURN_IF_ERROR(check_partition(m, refuse));
  SQZ_RETURN_IF_ERROR(check_codes(m, refuse));
  const bool all_dense = std::all_of(m.layers.begin(), m.layers.end(),
                                     [](const LayerPolicy& layer) { return layer.dense; });
  if (m.pruned) return check_pruned(m, all_dense, refuse);
  if (m.partition == Partition::kKmeans && (m.levels == 0) != all_dense) {
    return refuse("levels", m.levels,
                  all_dense ? "0: every layer is dense" : "at least 1: not every layer is dense");
  }
  for (const auto& [field, there] :
       {std::pair("key_calibration", m.key_calibration), {"heavy_hitters", m.heavy_hitters}}) {
    if (there && all_dense) return refuse(field, "true", "false: every layer is dense");
  }
  if (!all_dense && m.tokens - m.sink - m.tail < 1) {
    return refuse("tokens", m.tokens, "more than sink and tail together");
  }
  SQZ_RETURN_IF_ERROR(check_windows(m, refuse));
  if (!m.layer_budgets) return {};
  return check_budgets(*m.layer_budgets, m.model.layers, {label + ": layer_budgets", code});
}

std::string build_id(std::map<std::string, std::string> metadata, const std::string& source) {
  metadata.erase(kChecksumsKey);
  metadata.erase(kCalibrationKey);
  if (source != kTailSource && !source.empty()) metadata[kCalibrationKey] = source;
  const std::string text = JsonText(metadata).str();
  return hex(xxh3_64(std::as_bytes(std::span(text))));
}

Status check_same_build(const std::map<std::string, std::string>& found,
                        const std::map<std::string, std::string>& expected,
                        const std::string& path) {
  const JsonMembers ours = settings_of(expected), theirs = settings_of(found);
  JsonMembers all = ours;
  all.insert(theirs.begin(), theirs.end());
  const auto value = [](const JsonMembers& from, const std::string& name) {
    const auto at = from.find(name);
    return at == from.end() ? std::string("nothing") : at->second.str();
  };
  for (const auto& [name, unused] : all) {
    if (value(theirs, name) == value(ours, name)) continue;
    return {Code::kMismatch, bad_field(path, name, value(theirs, name), value(ours, name))};
  }
  return {};
}

Result<IndexMetadata> metadata_from_strings(const std::map<std::string, std::string>& strings,
                                            const std::string& path) {
  MetadataStrings in(strings, path);
  IndexMetadata m;
  m.tokens_hash = in.string("tokens_hash");
  m.tokens = in.integer("tokens", 1, kMaxTokens);
  m.sink = in.integer("sink", 0, kMaxTokens);
  m.tail = in.integer("tail", 0, kMaxTokens);
  m.levels = static_cast<int>(in.integer("levels", 0, kMaxLevels));
  if (in.has("kv") && !in.boolean("kv")) {
    in.fail("kv", "false", "true: build the index again, keys and values are stored now");
  }
  m.has_value_means = in.boolean("value_means");
  m.build = JsonText(in.json("build").root());
  const std::string partition = in.string("partition"), dtype = in.string("dtype");
  const auto known = std::find(std::begin(kPartitions), std::end(kPartitions), partition);
  if (known == std::end(kPartitions)) {
    in.fail("partition", in_quotes(partition), "\"kmeans\", \"pages\", \"pruned\" or \"buckets\"");
  } else {
    m.partition = static_cast<Partition>(known - std::begin(kPartitions));
  }
  if (m.partition == Partition::kPages) m.page_size = in.integer("page_size", 1, kMaxPageSize);
  if (m.partition == Partition::kBuckets) {
    m.buckets = in.integer("buckets", 2, kMaxBuckets);
    m.hidden = in.integer("hidden", 1, kMaxBuckets);
    check_logits(in, "train the query classifier again and build the index with it");
  }
  const auto element = dtype_from_name(dtype);
  if (!element) in.fail("dtype", in_quotes(dtype), "BF16 or F16");
  m.dtype = element.value_or(DType::kBF16);
  read_origin(in, m);
  in.parse("layers", m.layers, [&](const JsonValue& json, const std::string& label) {
    return layers_from_json(json, m.partition == Partition::kPruned, label);
  });
  read_codes(in, m);
  m.key_calibration = in.flag("key_calibration");
  m.heavy_hitters = in.flag("heavy_hitters");
  if (m.partition == Partition::kPruned) in.parse("pruned", m.pruned, pruned_from_json);
  if (in.has("chat")) m.chat = JsonText(in.json("chat").root());
  if (in.has("layer_budgets")) in.parse("layer_budgets", m.layer_budgets, budgets_from_json);
  SQZ_RETURN_IF_ERROR(in.status());
  SQZ_RETURN_IF_ERROR(check_metadata(m, path + ": __metadata__", Code::kCorrupt));
  return m;
}

}  // namespace sqz
