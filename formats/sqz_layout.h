// Which tensors a .sqz index has, in which order and where: the one place that knows. The writer
// fills the places, the reader demands them, verify() walks them. docs/format.md says it in words.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/sqz_container.h"
#include "formats/sqz_writer.h"

namespace sqz {

// What the names of a layer's tensors begin with, and of those of a level (from 1) behind that.
inline std::string layer_prefix(int64_t layer) {
  return "layers." + std::to_string(layer) + '.';
}
inline std::string level_prefix(size_t level) {
  return "level." + std::to_string(level) + '.';
}

// The layer's slots and exact keys, which follow from the metadata. How many clusters there are is
// for the builder to say, so there are none here.
LayerShape shape_without_clusters(const IndexMetadata& metadata, int64_t layer);

// Every tensor but the paddings of an index, in file order, with bytes; not placed yet.
// kInvalidArgument if metadata and shapes do not fit each other or a size overflows: `label` opens
// the message.
Result<std::vector<PlannedTensor>> plan_tensors(const IndexMetadata& metadata,
                                                std::span<const LayerShape> shapes,
                                                const std::string& label);

// A tensor of a layer's query classifier, in an index and in a file of its own.
struct ClassifierTensor {
  const char* name;  // "centroids", behind "buckets." in an index
  const float* ClassifierView::*view;
  std::vector<float> QmodelLayer::*values;
  std::vector<int64_t> shape;
};
// buckets: C, hidden: H.
std::vector<ClassifierTensor> classifier_tensors(const ModelDescription& model, int64_t buckets,
                                                 int64_t hidden);

constexpr int64_t page_count(int64_t slots, int64_t page_size) {
  return slots / page_size + (slots % page_size != 0);
}

}  // namespace sqz
