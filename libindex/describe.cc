#include "libindex/describe.h"

#include "formats/sqz_metadata.h"
#include "libindex/builder.h"

namespace sqz {
namespace {

// The parts of the first layer that is not dense.
struct Shape {
  std::vector<int64_t> clusters;  // of each level, coarse to fine; or the buckets
  int64_t clustered = 0, pages = 0;
};

Shape index_shape(const SqzFile& file) {
  Shape out;
  const IndexMetadata& metadata = file.metadata();
  for (int64_t i = 0; i < metadata.model.layers && out.clustered == 0; ++i) {
    if (metadata.layers[static_cast<size_t>(i)].dense) continue;
    const LayerView layer = file.layer(i);
    for (int k = 0; k < layer.levels; ++k) out.clusters.push_back(layer.level[k].clusters);
    if (layer.buckets > 0) out.clusters.push_back(layer.buckets);
    out.clustered = layer.slots;
    out.pages = layer.pages;
  }
  return out;
}

JsonText layers_json(const IndexMetadata& metadata) {
  std::vector<JsonText> out;
  for (size_t l = 0; l < metadata.layers.size(); ++l) {
    const LayerPolicy& layer = metadata.layers[l];
    std::vector<std::string> state;
    for (size_t i = 0; !metadata.state.empty() && i < metadata.state[l].size(); ++i) {
      state.push_back(metadata.state[l][i].name);
    }
    const LayerKind kind = metadata.model.layer(static_cast<int64_t>(l)).kind;
    out.push_back({{"kind", layer_kind_name(kind)},
                   {"dense", layer.dense},
                   {"window", layer.window},
                   {"rows16", layer.rows16},
                   {"state", state}});
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

}  // namespace

Result<JsonMembers> describe_index(const SqzFile& file) {
  SQZ_ASSIGN_OR_RETURN(const Calibration calibration, file.calibration());
  const IndexMetadata& metadata = file.metadata();
  const Shape shape = index_shape(file);
  return JsonMembers{
      {"path", file.path()},
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
      {"heavy_hitters", metadata.heavy_hitters},
      {"chat", metadata.chat},
      {"context_id", metadata.context_id()},
      {"after", metadata.after},
      {"layer_budgets", metadata.layer_budgets ? to_json(*metadata.layer_budgets) : JsonText()},
      {"pruned", pruned_json(metadata)},
      {"levels", metadata.levels},
      {"clustered", shape.clustered},
      {"clusters", shape.clusters},
      {"dtype", dtype_name(metadata.dtype)},
      {"rows", rows_name(metadata.rows)},
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

JsonMembers describe_build(const std::string& path, const BuildReport& report) {
  const BuildSeconds& took = report.seconds;
  JsonMembers seconds = {
      {"cluster", took.cluster}, {"calibrate", took.calibrate}, {"write", took.write}};
  if (took.capture > 0) seconds["capture"] = took.capture;
  return {{"path", path},
          {"tokens", report.tokens},
          {"clustered", report.clustered},
          {"clusters", report.clusters},
          {"pages", report.pages},
          {"bytes", report.bytes},
          {"build_id", report.build_id},
          {"engine", report.engine},
          {"fingerprint", report.fingerprint},
          {"seconds", seconds}};
}

}  // namespace sqz
