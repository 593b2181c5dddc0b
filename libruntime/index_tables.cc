#include "libruntime/index_tables.h"

#include <cmath>

namespace sqz {
namespace {

Status check_offsets(const LayerView& view, int level, int64_t head, int64_t layer,
                     const std::string& path) {
  const LevelView& v = view.level[level];
  const int64_t end = level + 1 < view.levels ? view.level[level + 1].clusters : view.slots;
  const uint32_t* offsets = v.offsets + head * (v.clusters + 1);
  const auto refuse = [&](int64_t index, int64_t low, int64_t high) -> Status {
    const std::string field =
        concat("layers.", layer, ".level.", level + 1, ".offsets[", head, "][", index, "]");
    return {Code::kCorrupt, bad_field(path, field, concat(offsets[index]),
                                      low == high ? concat(low) : concat(low, " to ", high))};
  };
  if (offsets[0] != 0) return refuse(0, 0, 0);
  for (int64_t i = 1; i <= v.clusters; ++i) {
    if (offsets[i] < offsets[i - 1] || offsets[i] > end) return refuse(i, offsets[i - 1], end);
  }
  if (offsets[v.clusters] != end) return refuse(v.clusters, end, end);
  return {};
}

Status count_buckets(const LayerView& view, int64_t layer, const std::string& path,
                     std::vector<uint32_t>& sizes) {
  sizes.resize(static_cast<size_t>(view.kv_heads * view.buckets));
  for (int64_t head = 0; head < view.kv_heads && view.buckets > 0; ++head) {
    const uint32_t* offsets = view.bucket_offsets + head * (view.buckets + 1);
    for (int64_t i = 0; i <= view.buckets; ++i) {
      const int64_t low = i == 0 ? 0 : i == view.buckets ? view.slots : offsets[i - 1];
      const int64_t high = i == 0 ? 0 : view.slots;
      if (offsets[i] < low || offsets[i] > high) {
        const std::string field = concat("layers.", layer, ".buckets.offsets[", head, "][", i, "]");
        return {Code::kCorrupt, bad_field(path, field, concat(offsets[i]),
                                          low == high ? concat(low) : concat(low, " to ", high))};
      }
      if (i > 0) sizes[head * view.buckets + i - 1] = offsets[i] - offsets[i - 1];
    }
  }
  return {};
}

}  // namespace

Result<LayerTable> make_layer_table(const LayerView& view, int64_t layer, const std::string& path) {
  LayerTable table;
  SQZ_RETURN_IF_ERROR(count_buckets(view, layer, path, table.bucket_sizes));
  for (int level = view.levels - 1; level >= 0; --level) {
    const LevelView& v = view.level[level];
    LevelTable& out = table.level[level];
    out.sizes.resize(static_cast<size_t>(view.kv_heads * v.clusters));
    out.log_sizes.resize(out.sizes.size());
    for (int64_t head = 0; head < view.kv_heads; ++head) {
      SQZ_RETURN_IF_ERROR(check_offsets(view, level, head, layer, path));
      const uint32_t* offsets = v.offsets + head * (v.clusters + 1);
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
