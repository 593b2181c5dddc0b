// The tensors of a .sqz index: names, types, shapes and order (docs/format.md says it in words).
// Layout, reader, writer and ranges of KV heads all go through each_tensor().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/sqz_container.h"
#include "formats/sqz_file.h"

namespace sqz {

// The names of a layer's tensors begin with layer_prefix(), behind it those of a level (from 1)
// with level_prefix().
inline std::string layer_prefix(int64_t layer) {
  return "layers." + std::to_string(layer) + '.';
}
inline std::string level_prefix(int64_t level) {
  return "level." + std::to_string(level) + '.';
}

constexpr int64_t page_count(int64_t slots, int64_t page_size) {
  return slots / page_size + (slots % page_size != 0);
}

using Dims = std::vector<int64_t>;

// Calls visit(name, member, dims) for each tensor of a query classifier, F32 [Hkv, dims...], in
// file order. `classifier` is a ClassifierView or a QmodelLayer, `member` its member.
template <class Classifier, class Visit>
void each_classifier_tensor(Classifier& classifier, int64_t buckets, int64_t hidden, int64_t dim,
                            const Visit& visit) {
  visit("centroids", classifier.centroids, Dims{buckets, dim});
  visit("hidden.weight", classifier.hidden_weight, Dims{hidden, dim});
  visit("hidden.bias", classifier.hidden_bias, Dims{hidden});
  visit("output.weight", classifier.output_weight, Dims{buckets, hidden});
  visit("output.bias", classifier.output_bias, Dims{buckets});
}

// Calls visit(name, pointer, dtype, dims) for each tensor of a layer but its state, which stands
// behind them, in file order: the name
// behind layer_prefix(), the pointer in `view` (a LayerView with its sizes set), and the shape
// behind [Hkv].
template <class View, class Visit>
void each_tensor(const IndexMetadata& metadata, View& view, const Visit& visit) {
  const int64_t dim = view.head_dim, value_dim = view.value_dim, slots = view.slots;
  const DType dtype = view.dtype;
  const auto codes = [&](const std::string& name, auto& rows, int64_t width) {
    visit(name, rows.codes, DType::kI8, Dims{slots, width});
    visit(name + ".scales", rows.scales, dtype, Dims{slots});
  };
  for (int k = 0; k < view.levels; ++k) {
    auto& level = view.level[static_cast<size_t>(k)];
    const std::string name = level_prefix(k + 1);
    visit(name + "centroids", level.centroids, dtype, Dims{level.clusters, dim});
    visit(name + "offsets", level.offsets, DType::kU32, Dims{level.clusters + 1});
    if (metadata.has_value_means) {
      visit(name + "value_means", level.value_means, dtype, Dims{level.clusters, value_dim});
    }
  }
  if (view.pages > 0) {
    visit("pages.min", view.page_min, dtype, Dims{view.pages, dim});
    visit("pages.max", view.page_max, dtype, Dims{view.pages, dim});
  }
  if (view.buckets > 0) {
    visit("buckets.offsets", view.bucket_offsets, DType::kU32, Dims{view.buckets + 1});
    each_classifier_tensor(view.classifier, view.buckets, view.classifier.hidden, dim,
                           [&](const std::string& name, auto& pointer, const Dims& dims) {
                             visit("buckets." + name, pointer, DType::kF32, dims);
                           });
  }
  if (slots > 0) {
    visit("positions", view.positions, DType::kU32, Dims{slots});
    if (metadata.heavy_hitters) visit("heavy", view.heavy, DType::kU32, Dims{slots});
    if (view.coded_keys.bits > 0) {
      codes("keys", view.coded_keys, dim);
      codes("values", view.coded_values, value_dim);
    } else {
      visit("keys", view.keys, dtype, Dims{slots, dim});
      visit("values", view.values, dtype, Dims{slots, value_dim});
    }
  }
  if (view.exact > 0) {
    visit("exact.keys", view.exact_keys, dtype, Dims{view.exact, dim});
    visit("exact.values", view.exact_values, dtype, Dims{view.exact, value_dim});
  }
}

// The names of a layer's state tensors begin with it, behind layer_prefix().
inline constexpr const char* kStatePrefix = "state.";

// The numbers of clusters of each layer, coarse to fine; none for a layer without clusters.
using ClusterCounts = std::vector<std::vector<int64_t>>;

// A layer's view with its sizes, which follow from the metadata and the numbers of clusters, and
// without pointers.
LayerView layer_shape(const IndexMetadata& metadata, int64_t layer,
                      const std::vector<int64_t>& clusters);

// Every tensor of an index but the paddings, in file order, with bytes; not placed yet.
// kInvalidArgument if metadata and clusters do not fit each other or a size overflows: `label`
// opens the message.
Result<std::vector<PlannedTensor>> plan_tensors(const IndexMetadata& metadata,
                                                const ClusterCounts& clusters,
                                                const std::string& label);

// Whether a tensor of a layer's state may have this name: letters, digits and _.
bool is_state_name(std::string_view name);

}  // namespace sqz
