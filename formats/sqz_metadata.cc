#include "formats/sqz_metadata.h"

#include <algorithm>
#include <cmath>

#include "formats/json_fields.h"

namespace sqz {
namespace {

constexpr int64_t kMaxTokens = int64_t{UINT32_MAX};  // positions are u32

bool is_hash(const std::string& hash) {
  return hash.size() == 16 && hash.find_first_not_of("0123456789abcdef") == std::string::npos;
}

Json layers_to_json(const std::vector<LayerPolicy>& layers) {
  Json json = Json::array();
  for (const LayerPolicy& layer : layers) {
    json.push_back({{"dense", layer.dense}, {"window", layer.window}});
  }
  return json;
}

Result<std::vector<LayerPolicy>> layers_from_json(const Json& json, const std::string& label) {
  if (!json.is_array()) {
    return Status(Code::kCorrupt, concat(label, ": found ", found_text(json),
                                         ", expected an array of one object a layer"));
  }
  std::vector<LayerPolicy> layers;
  layers.reserve(json.size());
  for (const Json& entry : json) {
    JsonFields fields(entry, label);
    LayerPolicy layer;
    layer.dense = fields.boolean("dense");
    layer.window = fields.integer("window", 0, int64_t{1} << 40);
    if (!fields.status().ok()) return fields.status();
    layers.push_back(layer);
  }
  return layers;
}

// The strings of "__metadata__", each decoded from its JSON text when asked for. As JsonFields,
// it keeps the first complaint.
class MetadataStrings {
 public:
  MetadataStrings(const std::map<std::string, std::string>& strings, const std::string& path)
      : strings_(strings), label_(path + ": __metadata__") {}

  std::string string(const char* key) {
    const auto at = strings_.find(key);
    if (at != strings_.end()) return at->second;
    fail(bad_field(label_, key, "nothing", "a value"));
    return {};
  }

  Json json(const char* key) {
    const std::string value = string(key);
    if (!status_.ok()) return {};
    Result<Json> parsed = parse_json(value, concat(label_, ": ", key));
    if (parsed.ok()) return *std::move(parsed);
    status_ = parsed.status();
    return {};
  }

  int64_t integer(const char* key, int64_t low, int64_t high) {
    const Json object = {{key, json(key)}};
    JsonFields fields(object, label_);
    const int64_t value = fields.integer(key, low, high);
    if (status_.ok()) status_ = fields.status();
    return value;
  }

  bool boolean(const char* key) {
    const std::string value = string(key);
    if (status_.ok() && value != "true" && value != "false") {
      fail(bad_field(label_, key, in_quotes(value), "true or false"));
    }
    return value == "true";
  }

  void fail(std::string message) {
    if (status_.ok()) status_ = {Code::kCorrupt, std::move(message)};
  }
  std::string label(const char* key) const { return concat(label_, ": ", key); }
  const Status& status() const { return status_; }

 private:
  const std::map<std::string, std::string>& strings_;
  std::string label_;
  Status status_;
};

}  // namespace

const char* partition_name(Partition partition) {
  return partition == Partition::kPages ? "pages" : "kmeans";
}

std::string producer_name() {
  return "sqz " SQZ_VERSION;
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
  if (pages && m.levels != 0) {
    return refuse("levels", concat(m.levels), "0: the partition is pages");
  }
  if (pages && m.has_value_means) return refuse("value_means", "true", "false: of pages");
  if (!pages && (m.levels > 0) != (sparse > 0)) {
    return refuse("levels", concat(m.levels),
                  sparse > 0 ? "at least 1: not every layer is dense" : "0: every layer is dense");
  }
  if (m.key_calibration && sparse == 0) {
    return refuse("key_calibration", "true", "false: every layer is dense");
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
  return {};
}

std::map<std::string, std::string> metadata_to_strings(const IndexMetadata& metadata) {
  std::map<std::string, std::string> out = {
      {"format", "sqz"},
      {"format_version", std::to_string(kFormatVersion)},
      {"kind", "index"},
      {"producer", metadata.producer},
      {"model", json_text(to_json(metadata.model))},
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
      {"layers", json_text(layers_to_json(metadata.layers))},
      {"build", json_text(metadata.build)}};
  if (metadata.partition == Partition::kPages) {
    out["page_size"] = std::to_string(metadata.page_size);
  }
  if (metadata.key_calibration) out["key_calibration"] = "true";
  return out;
}

Status check_format(const std::map<std::string, std::string>& strings, const std::string& path) {
  MetadataStrings in(strings, path);
  const auto format = strings.find("format");
  if (format == strings.end() || format->second != "sqz") {
    return {Code::kCorrupt,
            concat(path, ": a safetensors file but not an index: __metadata__: format: found ",
                   format == strings.end() ? "nothing" : in_quotes(format->second),
                   ", expected \"sqz\"")};
  }
  const int64_t version = in.integer("format_version", 1, INT64_MAX);
  const std::string producer = in.string("producer"), kind = in.string("kind");
  SQZ_RETURN_IF_ERROR(in.status());
  if (version > kFormatVersion) {
    return {Code::kUnsupported,
            concat(path, ": format_version: found ", version, " (written by ", in_quotes(producer),
                   "), expected at most ", kFormatVersion, ", which ", producer_name(),
                   " reads: use a newer sqz, or build the index again with this one")};
  }
  if (kind != "index") {
    return {Code::kUnsupported,
            bad_field(path + ": __metadata__", "kind", in_quotes(kind), "\"index\"")};
  }
  return {};
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
  metadata.build = in.json("build");
  const std::string partition = in.string("partition"), dtype = in.string("dtype");
  const Json model = in.json("model"), layers = in.json("layers");
  if (partition == partition_name(Partition::kPages)) {
    metadata.partition = Partition::kPages;
    metadata.page_size = in.integer("page_size", 1, kMaxPageSize);
  } else if (partition != partition_name(Partition::kKmeans)) {
    in.fail(bad_field(path, "__metadata__: partition", in_quotes(partition),
                      "\"kmeans\" or \"pages\""));
  }
  if (strings.contains("key_calibration")) metadata.key_calibration = in.boolean("key_calibration");
  const auto known = dtype_from_name(dtype);
  if (known) {
    metadata.dtype = *known;
  } else {
    in.fail(bad_field(path, "__metadata__: dtype", in_quotes(dtype), "BF16 or F16"));
  }
  if (!in.status().ok()) return in.status();
  SQZ_ASSIGN_OR_RETURN(metadata.model, model_from_json(model, in.label("model")));
  SQZ_ASSIGN_OR_RETURN(metadata.layers, layers_from_json(layers, in.label("layers")));
  SQZ_RETURN_IF_ERROR(check_metadata(metadata, path + ": __metadata__", Code::kCorrupt));
  return metadata;
}

}  // namespace sqz
