#include "formats/sqz_metadata.h"

#include <algorithm>
#include <cmath>

#include "formats/json_fields.h"
#include "formats/metadata_strings.h"
#include "formats/sqz_container.h"

namespace sqz {
namespace {

constexpr int64_t kMaxTokens = int64_t{UINT32_MAX};  // positions are u32

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

}  // namespace

const char* partition_name(Partition partition) {
  return partition == Partition::kPages ? "pages" : "kmeans";
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
      {"kind", kind_name(FileKind::kIndex)},
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
