// What every session of an index needs and the file does not store ready-made: the number of keys
// below each cluster, and the guarantee that no offset leads out of bounds.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz {

// Arrays are [Hkv, n_k], as in LevelView.
struct LevelTable {
  std::vector<uint32_t> sizes;   // N_i: keys below the cluster
  std::vector<float> log_sizes;  // log N_i; -infinity for an empty cluster
};

struct LayerTable {
  std::array<LevelTable, kMaxLevels> level;
  std::vector<uint32_t> bucket_sizes;  // [Hkv, C]: keys in each bucket
  // [Hkv, C]: the classifier's output bias + log bucket_sizes; -infinity for an empty bucket. The
  // softmax over the logits with it is each bucket's share of the attention.
  std::vector<float> bucket_bias;
};

// Checks all offsets of one layer (they start at 0, never decrease, end at the next level's number
// of clusters or at M) and counts. kCorrupt names the tensor and the first bad entry: a file whose
// payload was damaged must never make a session read out of bounds.
Result<LayerTable> make_layer_table(const LayerView& view, int64_t layer, const std::string& path);

}  // namespace sqz
