// Tables that every session of an index needs and the file does not store: the number of keys below
// each cluster, and copies of the offsets that are known to stay in bounds.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz {

// Arrays are [Hkv, n_k], as in LevelView.
struct LevelTable {
  std::vector<uint32_t> offsets;  // [Hkv, n_k + 1]: the copy that was checked
  std::vector<uint32_t> sizes;    // N_i: keys below the cluster
  std::vector<float> log_sizes;   // log N_i; -infinity for an empty cluster
};

struct LayerTable {
  std::array<LevelTable, kMaxLevels> level;
  std::vector<uint32_t> bucket_offsets;  // [Hkv, C + 1]: the copy that was checked
  std::vector<uint32_t> heavy;           // [Hkv, M]: a copy; the selector h2o checks it
  std::vector<uint32_t> bucket_sizes;    // [Hkv, C]: keys in each bucket
  // [Hkv, C]: the classifier's output bias + log bucket_sizes; -infinity for an empty bucket. The
  // softmax over the logits with it is each bucket's share of the attention.
  std::vector<float> bucket_bias;
};

// Copies and checks all offsets of one layer (they start at 0, never decrease, end at the next
// level's number of clusters or at M) and counts. `view` then points to the copies: a payload that
// was damaged, or that changes while it is mapped, must never make a session read out of bounds.
// kCorrupt names the tensor and the first bad entry.
Result<LayerTable> make_layer_table(LayerView& view, int64_t layer, const std::string& path);

}  // namespace sqz
