#include "tools/common/index_table.h"

#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

struct Shape {
  std::vector<int64_t> clusters;  // a level, coarse to fine, of the first sparse layer
  int64_t clustered = 0, exact = 0, pages = 0;
  int64_t dense_layers = 0;
};

Shape index_shape(const SqzFile& file) {
  Shape out;
  const IndexMetadata& metadata = file.metadata();
  for (int64_t i = 0; i < metadata.model.layers; ++i) {
    const LayerView layer = file.layer(i);
    if (metadata.layers[static_cast<size_t>(i)].dense) {
      ++out.dense_layers;
    } else if (out.clustered == 0) {
      for (int k = 0; k < layer.levels; ++k) out.clusters.push_back(layer.level[k].clusters);
      if (layer.buckets > 0) out.clusters.push_back(layer.buckets);
      out.clustered = layer.slots;
      out.pages = layer.pages;
      out.exact = layer.exact;
    }
  }
  return out;
}

JsonText layers_json(const IndexMetadata& metadata) {
  std::vector<JsonText> out;
  for (const LayerPolicy& layer : metadata.layers) {
    out.push_back({{"dense", layer.dense}, {"window", layer.window}, {"rows16", layer.rows16}});
  }
  return out;
}

JsonText pruned_json(const IndexMetadata& metadata) {
  if (!metadata.pruned) return nullptr;
  std::vector<int64_t> kept;
  for (const LayerPolicy& layer : metadata.layers) kept.push_back(layer.kept);
  return {{"selector", metadata.pruned->selector},
          {"budget", metadata.pruned->budget},
          {"keep", metadata.pruned->keep},
          {"kept", kept}};
}

std::string rows_text(const IndexMetadata& metadata) {
  std::string out = "stored";
  if (metadata.rows != RowKind::k16) {
    out += concat(" as ", rows_name(metadata.rows), ", in 8 bits");
  }
  std::vector<int64_t> layers16;
  for (size_t i = 0; i < metadata.layers.size(); ++i) {
    if (metadata.layers[i].rows16) layers16.push_back(static_cast<int64_t>(i));
  }
  if (!layers16.empty()) out += concat("; in 16 in layers ", list_text(layers16));
  if (metadata.key_codes > 0) out += concat("; key codes of ", metadata.key_codes, " bits");
  return out;
}

std::pair<std::string, std::string> parts_row(const Shape& shape, const IndexMetadata& metadata) {
  if (metadata.pruned) {
    std::vector<int64_t> kept;
    for (const LayerPolicy& layer : metadata.layers) kept.push_back(layer.kept);
    return {"pruned", concat("for selector ", metadata.pruned->selector, " at budget ",
                             metadata.pruned->budget, ": ", list_text(kept), " of ",
                             metadata.tokens - metadata.sink - metadata.tail,
                             " keys a KV head are left, by layer")};
  }
  const int64_t page_size = metadata.page_size;
  if (shape.pages > 0) {
    return {"pages", concat(shape.pages, " a KV head, of ", page_size, " tokens")};
  }
  if (metadata.partition == Partition::kBuckets && !shape.clusters.empty()) {
    return {"buckets",
            concat(metadata.buckets, " a KV head, named by ", metadata.hidden, " hidden units")};
  }
  return {"clusters", shape.clusters.empty()
                          ? "none: every layer is dense"
                          : list_text(shape.clusters) + " a KV head, coarse to fine"};
}

}  // namespace

std::string calibration_text(const std::string& source) {
  return source == kTailSource
             ? "the context's own last tokens; sqz-index calibrate does it with prompts"
             : source;
}

JsonMembers index_json(const SqzFile& file, const Calibration& calibration) {
  const IndexMetadata& metadata = file.metadata();
  const Shape shape = index_shape(file);
  return {{"path", file.path()},
          {"bytes", file.file_bytes()},
          {"producer", metadata.producer},
          {"fingerprint", fingerprint(metadata.model)},
          {"model", to_json(metadata.model)},
          {"tokenizer_hash", metadata.tokenizer_hash},
          {"tokens_hash", metadata.tokens_hash},
          {"tokens", metadata.tokens},
          {"sink", metadata.sink},
          {"tail", metadata.tail},
          {"partition", partition_name(metadata.partition)},
          {"page_size", metadata.page_size},
          {"pages", shape.pages},
          {"key_calibration", metadata.key_calibration},
          {"heavy_hitters", metadata.heavy_hitters},
          {"chat", metadata.chat},
          {"layer_budgets", metadata.layer_budgets ? to_json(*metadata.layer_budgets) : JsonText()},
          {"pruned", pruned_json(metadata)},
          {"levels", metadata.levels},
          {"clustered", shape.clustered},
          {"clusters", shape.clusters},
          {"dtype", dtype_name(metadata.dtype)},
          {"rows", rows_name(metadata.rows)},
          {"key_codes", metadata.key_codes},
          {"value_means", metadata.has_value_means},
          {"layers", layers_json(metadata)},
          {"calibration",
           {{"queries", calibration.queries},
            {"source", calibration.source},
            {"coarse_keep", calibration.coarse_keep}}},
          {"build", metadata.build},
          {"tensors", file.header().tensors.size()},
          {"metadata", file.raw_metadata()}};
}

Rows index_rows(const SqzFile& file, const Calibration& calibration) {
  const IndexMetadata& metadata = file.metadata();
  const Shape shape = index_shape(file);
  const ModelDescription& model = metadata.model;
  Rows rows = {
      {"index", file.path()},
      {"size", bytes_text(static_cast<double>(file.file_bytes()))},
      {"producer", metadata.producer},
      {"model", concat(model.architecture, ", ", model.layers, " layers, ", model.query_heads,
                       " query heads, ", model.kv_heads, " KV heads, head_dim ", model.head_dim)},
      {"fingerprint", fingerprint(model)},
      {"tokenizer",
       metadata.tokenizer_hash.empty() ? "none: built from token ids" : metadata.tokenizer_hash},
      {"tokens", concat(metadata.tokens, " (hash ", metadata.tokens_hash, ")")},
      {"exact", concat("first ", metadata.sink, " and last ", metadata.tail)},
      {"clustered",
       concat(metadata.pruned ? metadata.tokens - metadata.sink - metadata.tail : shape.clustered,
              " a KV head")},
      parts_row(shape, metadata),
      {"dense layers", concat(shape.dense_layers, " of ", model.layers)},
      {"type", std::string(dtype_name(metadata.dtype))},
      {"keys, values", rows_text(metadata)},
      {"calibration", calibration.queries == 0
                          ? "none"
                          : concat(calibration.queries, " queries a head, from ",
                                   calibration_text(calibration.source),
                                   metadata.key_calibration ? "; single keys, too" : "")}};
  if (metadata.heavy_hitters) rows.emplace_back("heavy hitters", "ordered, for --selector h2o");
  if (metadata.layer_budgets) {
    const LayerBudgets& budgets = *metadata.layer_budgets;
    rows.emplace_back("layer budgets", concat(budgets.allocation, ", keys of ", budgets.context,
                                              ": ", list_text(budgets.budget), "; ",
                                              budgets.uniform_budget, " on average"));
  }
  if (!metadata.chat.is_null()) {
    const JsonDocument chat = metadata.chat.parsed();
    const JsonValue* name = chat.root().find("name");
    rows.emplace_back("chat", name != nullptr ? std::string(name->string()) : "--chat-format");
  }
  for (auto& row : member_rows("build", metadata.build)) rows.push_back(std::move(row));
  return rows;
}

}  // namespace sqz
