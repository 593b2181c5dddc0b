#include "formats/sqz_layout.h"

#include <algorithm>

#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

constexpr int64_t kMaxSlots = int64_t{UINT32_MAX};  // slots and clusters are counted in u32

Status check_shape(const IndexMetadata& metadata, int64_t layer, const LayerShape& shape,
                   const Refuse& refuse) {
  const std::string name = "layers." + std::to_string(layer);
  const LayerShape want = shape_without_clusters(metadata, layer);
  const int64_t levels = metadata.layers[static_cast<size_t>(layer)].dense ? 0 : metadata.levels;
  for (const auto& [what, found, expected] :
       {std::tuple(" levels", std::ssize(shape.clusters), levels),
        std::tuple(" slots", shape.slots, want.slots),
        std::tuple(" exact keys", shape.exact, want.exact)}) {
    if (found != expected) return refuse(name, concat(found, what), expected);
  }
  int64_t least = 1;
  for (const int64_t clusters : shape.clusters) {
    if (clusters < least || clusters > shape.slots) {
      return refuse(name + ": clusters", clusters,
                    concat("at least ", least, " and at most ", shape.slots));
    }
    least = clusters;
  }
  return {};
}

// Adds the layer's tensors in file order.
void plan_layer(const IndexMetadata& metadata, int64_t layer, const LayerShape& shape,
                std::vector<PlannedTensor>& tensors) {
  const int64_t heads = metadata.model.kv_heads, dim = metadata.model.head_dim;
  const DType dtype = metadata.dtype, u32 = DType::kU32;
  const std::string prefix = layer_prefix(layer);
  uint64_t alignment = kPage;
  const auto add = [&](const std::string& name, DType type, std::vector<int64_t> dims) {
    tensors.push_back({prefix + name, type, std::move(dims), alignment, layer});
    alignment = kCacheLine;
  };
  for (size_t k = 0; k < shape.clusters.size(); ++k) {
    const std::string level = level_prefix(k + 1);
    const int64_t clusters = shape.clusters[k];
    add(level + "centroids", dtype, {heads, clusters, dim});
    add(level + "offsets", u32, {heads, clusters + 1});
    if (metadata.has_value_means) add(level + "value_means", dtype, {heads, clusters, dim});
  }
  if (shape.slots > 0 && metadata.partition == Partition::kPages) {
    const int64_t pages = page_count(shape.slots, metadata.page_size);
    add("pages.min", dtype, {heads, pages, dim});
    add("pages.max", dtype, {heads, pages, dim});
  }
  if (shape.slots > 0 && metadata.partition == Partition::kBuckets) {
    add("buckets.offsets", u32, {heads, metadata.buckets + 1});
    for (auto& part : classifier_tensors(metadata.model, metadata.buckets, metadata.hidden)) {
      add(concat("buckets.", part.name), DType::kF32, std::move(part.shape));
    }
  }
  if (shape.slots > 0) {
    add("positions", u32, {heads, shape.slots});
    if (metadata.heavy_hitters) add("heavy", u32, {heads, shape.slots});
    const RowKind rows = metadata.rows_of(layer);
    if (rows == RowKind::k16) {
      add("keys", dtype, {heads, shape.slots, dim});
      add("values", dtype, {heads, shape.slots, dim});
    } else {
      add("keys", DType::kI8, {heads, shape.slots, dim});
      add("keys.scales", dtype, {heads, shape.slots});
      add("values", DType::kI8, {heads, shape.slots, dim});
      add("values.scales", dtype, {heads, shape.slots});
    }
    if (metadata.key_codes > 0) {
      add("key_codes", DType::kU8, {heads, shape.slots, code_bytes(dim, metadata.key_codes)});
      add("key_codes.scales", dtype, {heads, shape.slots});
    }
  }
  if (shape.exact > 0) {
    add("exact.keys", dtype, {heads, shape.exact, dim});
    add("exact.values", dtype, {heads, shape.exact, dim});
  }
}

}  // namespace

std::vector<ClassifierTensor> classifier_tensors(const ModelDescription& model, int64_t buckets,
                                                 int64_t hidden) {
  using V = ClassifierView;
  using Q = QmodelLayer;
  const int64_t heads = model.kv_heads, d = model.head_dim;
  return {{"centroids", &V::centroids, &Q::centroids, {heads, buckets, d}},
          {"hidden.weight", &V::hidden_weight, &Q::hidden_weight, {heads, hidden, d}},
          {"hidden.bias", &V::hidden_bias, &Q::hidden_bias, {heads, hidden}},
          {"output.weight", &V::output_weight, &Q::output_weight, {heads, buckets, hidden}},
          {"output.bias", &V::output_bias, &Q::output_bias, {heads, buckets}}};
}

LayerShape shape_without_clusters(const IndexMetadata& m, int64_t layer) {
  const LayerPolicy& policy = m.layers[static_cast<size_t>(layer)];
  if (policy.dense) {
    return {.clusters = {},
            .exact = policy.window > 0 ? std::min(policy.window, m.tokens) : m.tokens};
  }
  return {.clusters = {},
          .slots = m.pruned ? policy.kept : m.tokens - m.sink - m.tail,
          .exact = m.sink + m.tail};
}

Result<std::vector<PlannedTensor>> plan_tensors(const IndexMetadata& metadata,
                                                std::span<const LayerShape> shapes,
                                                const std::string& label) {
  const Refuse refuse{label, Code::kInvalidArgument};
  if (shapes.size() != metadata.layers.size()) {
    return refuse("layers", concat(shapes.size(), " shapes"), metadata.layers.size());
  }
  if (metadata.tokens > kMaxSlots) {
    return refuse("tokens", metadata.tokens, concat("at most ", kMaxSlots));
  }
  std::vector<PlannedTensor> tensors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    SQZ_RETURN_IF_ERROR(check_shape(metadata, layer, shapes[i], refuse));
    plan_layer(metadata, layer, shapes[i], tensors);
  }
  if (metadata.has_rotation()) {
    const int64_t dim = metadata.model.head_dim;
    tensors.push_back({kRotationName, DType::kF32, {dim, dim}});
  }
  for (const CalibrationTable& table : calibration_tables(metadata)) {
    tensors.push_back({table.name, DType::kF32, table.shape});
  }
  tensors.push_back(header_hash_tensor());
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, label));
  return tensors;
}

}  // namespace sqz
