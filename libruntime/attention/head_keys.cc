#include "libruntime/attention/head_keys.h"

namespace sqz {

HeadKeys head_keys(const LayerView& view, const LayerTable& table, int64_t head) {
  const int64_t row_bytes = view.head_dim * dtype_size(view.dtype);
  const auto rows = [&](const void* keys, const void* values, int64_t count) {
    const int64_t bytes = head * count * row_bytes;
    return KeyRows{static_cast<const std::byte*>(keys) + bytes,
                   static_cast<const std::byte*>(values) + bytes};
  };
  HeadKeys out;
  out.dtype = view.dtype;
  out.dim = view.head_dim;
  out.exact_count = view.exact;
  if (view.exact > 0) out.exact = rows(view.exact_keys, view.exact_values, view.exact);
  if (view.keys != nullptr) out.slots = rows(view.keys, view.values, view.slots);
  if (view.coded_keys.bits == 0 && view.key_codes.bits == 0) return out;
  out.coded_keys = coded_head(view, view.coded_keys, false, head);
  out.coded_values = coded_head(view, view.coded_values, true, head);
  if (view.key_codes.bits == 0) return out;
  out.key_codes = coded_head(view, view.key_codes, false, head);
  for (int k = 0; k < view.levels; ++k) {
    const LevelView& level = view.level[k];
    out.centroids[k] = rows(level.centroids, level.value_means, level.clusters);
    out.log_sizes[k] = table.level[k].log_sizes.data() + head * level.clusters;
  }
  return out;
}

}  // namespace sqz
