#include "formats/sqz_layout.h"

#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

Status check_clusters(const IndexMetadata& metadata, int64_t layer,
                      const std::vector<int64_t>& clusters, const Refuse& refuse) {
  const int64_t levels = metadata.layers[static_cast<size_t>(layer)].dense ? 0 : metadata.levels;
  const std::string name = "layers." + std::to_string(layer);
  if (std::ssize(clusters) != levels) {
    return refuse(name, concat(clusters.size(), " levels"), levels);
  }
  const int64_t slots = layer_shape(metadata, layer, {}).slots;
  int64_t least = 1;
  for (const int64_t count : clusters) {
    if (count < least || count > slots) {
      return refuse(name + ": clusters", count, concat("at least ", least, " and at most ", slots));
    }
    least = count;
  }
  return {};
}

}  // namespace

LayerView layer_shape(const IndexMetadata& m, int64_t layer, const std::vector<int64_t>& clusters) {
  const LayerPolicy& policy = m.layers[static_cast<size_t>(layer)];
  LayerView out;
  out.dtype = m.dtype;
  const LayerGeometry geometry = m.model.layer(layer);
  out.kv_heads = geometry.kv_heads;
  out.head_dim = geometry.head_dim;
  out.value_dim = geometry.value_dim;
  if (!m.state.empty()) out.state = m.state[static_cast<size_t>(layer)];
  if (!geometry.has_keys()) return out;
  if (policy.dense) {
    // The next token sees these, and itself. Earlier versions have one more of a sliding window.
    const int64_t next = m.tokens - (m.version < kVersionOfLayers && geometry.window > 0 ? 1 : 0);
    out.exact = m.tokens - std::clamp<int64_t>(geometry.first_seen(next), 0, m.tokens);
    return out;
  }
  out.exact = m.sink + m.tail;
  out.slots = m.pruned ? policy.kept : m.tokens - out.exact;
  out.levels = static_cast<int>(clusters.size());
  for (size_t k = 0; k < clusters.size(); ++k) out.level[k].clusters = clusters[k];
  if (m.partition == Partition::kPages) {
    out.page_size = m.page_size;
    out.pages = page_count(out.slots, m.page_size);
  }
  if (m.partition == Partition::kBuckets) {
    out.buckets = m.buckets;
    out.classifier.hidden = m.hidden;
  }
  if (m.rows_of(layer) != RowKind::k16) out.coded_keys.bits = out.coded_values.bits = 8;
  return out;
}

Result<std::vector<PlannedTensor>> plan_tensors(const IndexMetadata& metadata,
                                                const ClusterCounts& clusters,
                                                const std::string& label) {
  const Refuse refuse{label, Code::kInvalidArgument};
  if (clusters.size() != metadata.layers.size()) {
    return refuse("layers", clusters.size(), metadata.layers.size());
  }
  std::vector<PlannedTensor> tensors;
  for (int64_t layer = 0; layer < std::ssize(clusters); ++layer) {
    const std::vector<int64_t>& own = clusters[static_cast<size_t>(layer)];
    SQZ_RETURN_IF_ERROR(check_clusters(metadata, layer, own, refuse));
    LayerView shape = layer_shape(metadata, layer, own);
    uint64_t alignment = kPage;
    each_tensor(metadata, shape, [&](const std::string& name, auto&, DType dtype, Dims dims) {
      dims.insert(dims.begin(), shape.kv_heads);
      tensors.push_back({layer_prefix(layer) + name, dtype, std::move(dims), alignment, layer});
      alignment = kCacheLine;
    });
    const LayerKind kind = metadata.model.layer(layer).kind;
    for (const StateTensor& state : shape.state) {
      if (metadata.version < kVersionOfLayers || kind == LayerKind::kShared ||
          kind == LayerKind::kNone || !is_state_name(state.name)) {
        return refuse(concat("layers.", layer, ": state"), in_quotes(state.name),
                      "letters, digits and _, in a layer that is neither shared nor none");
      }
      tensors.push_back({layer_prefix(layer) + kStatePrefix + state.name, state.dtype, state.shape,
                         alignment, layer});
      alignment = kCacheLine;
    }
  }
  for (const CalibrationTable& table : calibration_tables(metadata)) {
    tensors.push_back({table.name, DType::kF32, table.shape});
  }
  tensors.push_back(header_hash_tensor());
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, label));
  return tensors;
}

bool is_state_name(std::string_view name) {
  constexpr std::string_view kCharacters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz";
  return !name.empty() && name.find_first_not_of(kCharacters) == std::string_view::npos;
}

}  // namespace sqz
