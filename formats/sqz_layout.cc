#include "formats/sqz_layout.h"

#include <algorithm>

#include "formats/base/checked.h"
#include "formats/base/hash.h"
#include "formats/base/json.h"

namespace sqz {
namespace {

constexpr int64_t kMaxSlots = int64_t{UINT32_MAX};  // slots and clusters are counted in u32

Status refuse(const std::string& label, const std::string& field, const std::string& found,
              const std::string& expected) {
  return {Code::kInvalidArgument, bad_field(label, field, found, expected)};
}

Status check_shape(const IndexMetadata& metadata, int64_t layer, const LayerShape& shape,
                   const std::string& label) {
  const std::string name = concat("layers.", layer);
  const LayerPolicy& policy = metadata.layers[static_cast<size_t>(layer)];
  const auto levels = static_cast<int64_t>(shape.clusters.size());
  const int64_t want_levels = policy.dense ? 0 : metadata.levels;
  if (levels != want_levels) {
    return refuse(label, name, concat(levels, " levels"), concat(want_levels));
  }
  // Everything else about pages follows from the metadata.
  const int64_t want_slots = policy.dense      ? 0
                             : metadata.pruned ? policy.kept
                                               : metadata.tokens - metadata.sink - metadata.tail;
  if (shape.slots != want_slots) {
    return refuse(label, name, concat(shape.slots, " slots"), concat(want_slots));
  }
  const int64_t want_exact = !policy.dense ? metadata.sink + metadata.tail
                             : policy.window > 0 && policy.window < metadata.tokens
                                 ? policy.window
                                 : metadata.tokens;
  if (shape.exact != want_exact) {
    return refuse(label, name, concat(shape.exact, " exact keys"), concat(want_exact));
  }
  int64_t least = 1;
  for (const int64_t clusters : shape.clusters) {
    if (clusters < least || clusters > shape.slots) {
      return refuse(label, concat(name, ": clusters"), concat(clusters),
                    concat("at least ", least, " and at most ", shape.slots));
    }
    least = clusters;
  }
  return {};
}

// Collects a layer's tensors in file order.
class LayerPlan {
 public:
  LayerPlan(int64_t layer, std::vector<PlannedTensor>& tensors)
      : layer_(layer), prefix_(concat("layers.", layer, ".")), tensors_(tensors) {}

  void add(const char* name, Part part, int level, DType dtype, std::vector<int64_t> shape) {
    PlannedTensor tensor;
    tensor.name =
        level > 0 ? prefix_ + "level." + std::to_string(level) + "." + name : prefix_ + name;
    tensor.part = part;
    tensor.layer = layer_;
    tensor.level = level;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.alignment = first_ ? kPage : kCacheLine;
    first_ = false;
    tensors_.push_back(std::move(tensor));
  }

 private:
  int64_t layer_;
  std::string prefix_;
  std::vector<PlannedTensor>& tensors_;
  bool first_ = true;
};

void plan_layer(const IndexMetadata& metadata, int64_t layer, const LayerShape& shape,
                std::vector<PlannedTensor>& tensors) {
  const int64_t heads = metadata.model.kv_heads, dim = metadata.model.head_dim;
  LayerPlan plan(layer, tensors);
  int level = 0;
  for (const int64_t clusters : shape.clusters) {
    ++level;
    plan.add("centroids", Part::kCentroids, level, metadata.dtype, {heads, clusters, dim});
    plan.add("offsets", Part::kOffsets, level, DType::kU32, {heads, clusters + 1});
    if (metadata.has_value_means) {
      plan.add("value_means", Part::kValueMeans, level, metadata.dtype, {heads, clusters, dim});
    }
  }
  if (shape.slots > 0 && metadata.partition == Partition::kPages) {
    const int64_t pages = page_count(shape.slots, metadata.page_size);
    plan.add("pages.min", Part::kPageMin, 0, metadata.dtype, {heads, pages, dim});
    plan.add("pages.max", Part::kPageMax, 0, metadata.dtype, {heads, pages, dim});
  }
  if (shape.slots > 0 && metadata.partition == Partition::kBuckets) {
    const int64_t buckets = metadata.buckets, hidden = metadata.hidden;
    plan.add("buckets.offsets", Part::kBucketOffsets, 0, DType::kU32, {heads, buckets + 1});
    plan.add("buckets.centroids", Part::kBucketCentroids, 0, DType::kF32, {heads, buckets, dim});
    plan.add("buckets.hidden.weight", Part::kHiddenWeight, 0, DType::kF32, {heads, hidden, dim});
    plan.add("buckets.hidden.bias", Part::kHiddenBias, 0, DType::kF32, {heads, hidden});
    plan.add("buckets.output.weight", Part::kOutputWeight, 0, DType::kF32,
             {heads, buckets, hidden});
    plan.add("buckets.output.bias", Part::kOutputBias, 0, DType::kF32, {heads, buckets});
  }
  if (shape.slots > 0) {
    plan.add("positions", Part::kPositions, 0, DType::kU32, {heads, shape.slots});
    if (metadata.heavy_hitters) {
      plan.add("heavy", Part::kHeavy, 0, DType::kU32, {heads, shape.slots});
    }
    if (metadata.has_kv) {
      plan.add("keys", Part::kKeys, 0, metadata.dtype, {heads, shape.slots, dim});
      plan.add("values", Part::kValues, 0, metadata.dtype, {heads, shape.slots, dim});
    }
  }
  if (shape.exact > 0) {
    plan.add("exact.keys", Part::kExactKeys, 0, metadata.dtype, {heads, shape.exact, dim});
    plan.add("exact.values", Part::kExactValues, 0, metadata.dtype, {heads, shape.exact, dim});
  }
}

void plan_calibration(const IndexMetadata& metadata, std::vector<PlannedTensor>& tensors) {
  using C = Calibration;
  const std::vector<int64_t> heads = {C::kScopes, metadata.model.layers, metadata.model.kv_heads,
                                      C::kGrid};
  if (metadata.key_calibration) {
    tensors.push_back(plain_tensor("calibration.keys.thresholds", Part::kKeyThresholds, DType::kF32,
                                   {C::kScopes, C::kGrid}));
    tensors.push_back(
        plain_tensor("calibration.keys.shares", Part::kKeyShares, DType::kF32, heads));
  }
  if (metadata.levels == 0) return;
  const int64_t coarse = std::max(metadata.levels - 1, 1);
  tensors.push_back(plain_tensor("calibration.thresholds", Part::kThresholds, DType::kF32,
                                 {C::kScopes, C::kPaths, C::kGroups, C::kGrid}));
  tensors.push_back(plain_tensor("calibration.coarse", Part::kCoarse, DType::kF32,
                                 {C::kScopes, C::kGroups, coarse}));
  tensors.push_back(plain_tensor("calibration.shares", Part::kShares, DType::kF32, heads));
}

}  // namespace

PlannedTensor plain_tensor(std::string name, Part part, DType dtype, std::vector<int64_t> shape) {
  PlannedTensor tensor;
  tensor.name = std::move(name);
  tensor.part = part;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

PlannedTensor header_hash_tensor() {
  return plain_tensor(kHeaderHashName, Part::kHeaderHash, DType::kU8, {16});
}

Status size_tensors(std::vector<PlannedTensor>& tensors, const std::string& label) {
  for (PlannedTensor& tensor : tensors) {
    const auto count = checked_elements(tensor.shape);
    const auto bytes = count ? checked_mul(*count, dtype_size(tensor.dtype)) : std::nullopt;
    if (!bytes) {
      return refuse(label, tensor.name, shape_text(tensor.shape), "a size below 2^63 bytes");
    }
    tensor.bytes = static_cast<uint64_t>(*bytes);
  }
  return {};
}

Result<std::vector<PlannedTensor>> plan_tensors(const IndexMetadata& metadata,
                                                std::span<const LayerShape> shapes,
                                                const std::string& label) {
  if (shapes.size() != metadata.layers.size()) {
    return refuse(label, "layers", concat(shapes.size(), " shapes"),
                  concat(metadata.layers.size()));
  }
  if (metadata.tokens > kMaxSlots) {
    return refuse(label, "tokens", concat(metadata.tokens), concat("at most ", kMaxSlots));
  }
  std::vector<PlannedTensor> tensors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    SQZ_RETURN_IF_ERROR(check_shape(metadata, layer, shapes[i], label));
    plan_layer(metadata, layer, shapes[i], tensors);
  }
  plan_calibration(metadata, tensors);
  tensors.push_back(header_hash_tensor());
  SQZ_RETURN_IF_ERROR(size_tensors(tensors, label));
  return tensors;
}

Result<std::vector<PlannedTensor>> place_tensors(std::vector<PlannedTensor> tensors) {
  std::vector<PlannedTensor> placed;
  placed.reserve(2 * tensors.size());
  uint64_t end = 0;
  int64_t paddings = 0;
  for (PlannedTensor& tensor : tensors) {
    const uint64_t gap = (tensor.alignment - end % tensor.alignment) % tensor.alignment;
    if (gap > 0) {
      PlannedTensor padding = plain_tensor(concat(kPaddingPrefix, paddings++), Part::kPadding,
                                           DType::kU8, {static_cast<int64_t>(gap)});
      padding.offset = end;
      padding.bytes = gap;
      placed.push_back(std::move(padding));
    }
    tensor.offset = end + gap;  // no overflow: end is at most 2^63, see below
    end = tensor.offset + tensor.bytes;
    if (end > uint64_t{INT64_MAX}) {
      return Status(Code::kInvalidArgument,
                    concat("the index would be larger than 2^63 bytes at ", tensor.name));
    }
    placed.push_back(std::move(tensor));
  }
  return placed;
}

std::string header_text(const std::map<std::string, std::string>& metadata,
                        std::span<const PlannedTensor> tensors) {
  std::string out = "{\"__metadata__\":" + JsonText(metadata).str();
  for (const PlannedTensor& tensor : tensors) {
    out += ',' + JsonText(tensor.name).str() +
           ":{\"dtype\":" + JsonText(dtype_name(tensor.dtype)).str() +
           ",\"shape\":" + JsonText(tensor.shape).str() + ",\"data_offsets\":" +
           JsonText(std::vector{tensor.offset, tensor.offset + tensor.bytes}).str() + '}';
  }
  out += '}';
  return out;
}

std::string checksum_text(std::span<const PlannedTensor> tensors,
                          std::span<const uint64_t> hashes) {
  std::string out = "{";
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!has_checksum(tensors[i].part)) continue;
    if (out.size() > 1) out += ',';
    out += JsonText(tensors[i].name).str() + ':' +
           JsonText(hex(hashes.empty() ? uint64_t{0} : hashes[i])).str();
  }
  out += '}';
  return out;
}

}  // namespace sqz
