// Which tensors a .sqz index has, in which order and where: the one place that knows. The writer
// fills the places, the reader demands them, verify() walks them. docs/format.md says it in words.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "formats/sqz_writer.h"

namespace sqz {

inline constexpr uint64_t kPage = 4096;     // the data, and the first tensor of every layer
inline constexpr uint64_t kCacheLine = 64;  // every other tensor
inline constexpr const char* kHeaderHashName = "header.xxh3_128";
inline constexpr const char* kRotationName = "rotation";
inline constexpr const char* kPaddingPrefix = "padding.";

struct PlannedTensor {
  std::string name;  // which says what is in it
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  uint64_t alignment = kCacheLine;
  int64_t layer = -1;   // -1: not of a layer
  uint64_t offset = 0;  // from the start of the data, once placed
  uint64_t bytes = 0;
};

// The one that ends every file.
PlannedTensor header_hash_tensor();

// Sets every tensor's bytes from its shape; kInvalidArgument if one overflows.
Status size_tensors(std::vector<PlannedTensor>& tensors, const std::string& label);

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

// The same with offsets, and with the paddings that the alignments ask for.
Result<std::vector<PlannedTensor>> place_tensors(std::vector<PlannedTensor> tensors);

// The header's JSON text: metadata first, then the tensors in order.
std::string header_text(const std::map<std::string, std::string>& metadata,
                        std::span<const PlannedTensor> tensors);

constexpr int64_t page_count(int64_t slots, int64_t page_size) {
  return slots / page_size + (slots % page_size != 0);
}

// JSON text of {name: hash}, of the tensors that have a checksum. `hashes`: one a tensor, those of
// others are ignored; empty stands for zeros (the text has the same length).
std::string checksum_text(std::span<const PlannedTensor> tensors, std::span<const uint64_t> hashes);
inline bool has_checksum(std::string_view tensor) {
  return !tensor.starts_with(kPaddingPrefix) && tensor != kHeaderHashName;
}

}  // namespace sqz
