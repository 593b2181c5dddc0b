#include "libruntime/index_tables.h"

#include <cmath>

namespace sqz {
namespace {

// Offsets [n + 1] of one KV head: they start at 0, never decrease, end at `end`. Messages name
// the file, the tensor and the head.
Status check_offsets(const uint32_t* offsets, int64_t n, int64_t end, const std::string& path,
                     const std::string& tensor, int64_t head) {
  const auto refuse = [&](int64_t index, int64_t low, int64_t high) -> Status {
    return {Code::kCorrupt,
            bad_field(path, concat(tensor, "[", head, "][", index, "]"), concat(offsets[index]),
                      low == high ? concat(low) : concat(low, " to ", high))};
  };
  if (offsets[0] != 0) return refuse(0, 0, 0);
  for (int64_t i = 1; i <= n; ++i) {
    if (offsets[i] < offsets[i - 1] || offsets[i] > end) return refuse(i, offsets[i - 1], end);
  }
  if (offsets[n] != end) return refuse(n, end, end);
  return {};
}

// An array of the file as it is at this moment, for good.
std::vector<uint32_t> take_copy(const uint32_t*& array, int64_t count) {
  if (array == nullptr) return {};
  std::vector<uint32_t> copy(array, array + count);
  array = copy.data();  // which stays where it is when the vector moves
  return copy;
}

Status count_buckets(LayerView& view, int64_t layer, const std::string& path, LayerTable& table) {
  table.bucket_offsets = take_copy(view.bucket_offsets, view.kv_heads * (view.buckets + 1));
  table.bucket_sizes.resize(static_cast<size_t>(view.kv_heads * view.buckets));
  table.bucket_bias.resize(table.bucket_sizes.size());
  const std::string tensor = concat("layers.", layer, ".buckets.offsets");
  for (int64_t head = 0; head < view.kv_heads && view.buckets > 0; ++head) {
    const uint32_t* offsets = view.bucket_offsets + head * (view.buckets + 1);
    SQZ_RETURN_IF_ERROR(check_offsets(offsets, view.buckets, view.slots, path, tensor, head));
    for (int64_t i = 0; i < view.buckets; ++i) {
      const int64_t bucket = head * view.buckets + i;
      table.bucket_sizes[bucket] = offsets[i + 1] - offsets[i];
      table.bucket_bias[bucket] = view.classifier.output_bias[bucket] +
                                  std::log(static_cast<float>(table.bucket_sizes[bucket]));
    }
  }
  return {};
}

}  // namespace

Result<LayerTable> make_layer_table(LayerView& view, int64_t layer, const std::string& path) {
  LayerTable table;
  table.heavy = take_copy(view.heavy, view.kv_heads * view.slots);
  SQZ_RETURN_IF_ERROR(count_buckets(view, layer, path, table));
  for (int level = view.levels - 1; level >= 0; --level) {
    LevelView& v = view.level[level];
    const int64_t end = level + 1 < view.levels ? view.level[level + 1].clusters : view.slots;
    const std::string tensor = concat("layers.", layer, ".level.", level + 1, ".offsets");
    LevelTable& out = table.level[level];
    out.offsets = take_copy(v.offsets, view.kv_heads * (v.clusters + 1));
    out.sizes.resize(static_cast<size_t>(view.kv_heads * v.clusters));
    out.log_sizes.resize(out.sizes.size());
    for (int64_t head = 0; head < view.kv_heads; ++head) {
      const uint32_t* offsets = v.offsets + head * (v.clusters + 1);
      SQZ_RETURN_IF_ERROR(check_offsets(offsets, v.clusters, end, path, tensor, head));
      uint32_t* sizes = out.sizes.data() + head * v.clusters;
      float* log_sizes = out.log_sizes.data() + head * v.clusters;
      for (int64_t i = 0; i < v.clusters; ++i) {
        uint32_t size = offsets[i + 1] - offsets[i];
        if (level + 1 < view.levels) {
          const uint32_t* below =
              table.level[level + 1].sizes.data() + head * view.level[level + 1].clusters;
          size = 0;
          for (uint32_t child = offsets[i]; child < offsets[i + 1]; ++child) size += below[child];
        }
        sizes[i] = size;
        log_sizes[i] = std::log(static_cast<float>(size));
      }
    }
  }
  return table;
}

}  // namespace sqz
