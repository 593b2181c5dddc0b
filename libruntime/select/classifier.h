// The network of one KV head, from a query before RoPE to the share of its attention in each bucket
// (formats/qmodel_file.h).
#pragma once

#include <cstdint>
#include <span>

#include "libruntime/index_tables.h"
#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {

struct Classifier {
  int64_t dim = 0, hidden = 0, buckets = 0;  // d, H, C
  const float* hidden_weight = nullptr;      // [H, d]
  const float* hidden_bias = nullptr;        // [H]
  const float* output_weight = nullptr;      // [C, H]
  const float* output_bias = nullptr;        // [C] with the log of each bucket's size
};

// Of a layer of buckets, with its sizes; borrows from both.
Classifier head_classifier(const LayerView& view, const LayerTable& table, int64_t kv_head);

// Most queries that go through a network together: each row of the weights is read once for all.
inline constexpr int64_t kClassifierRows = kTileRows;

// Workspace of add_bucket_shares().
int64_t classifier_floats(int64_t dim, int64_t hidden, int64_t buckets);

// shares[c] += the softmax of each query's logits. rows: [count] pointers to [d] floats, at most
// kClassifierRows. A query or a weight that is no number makes a share none. The same bits whatever
// else is in the batch.
void add_bucket_shares(const CpuKernels& kernels, const Classifier& network,
                       const float* const* rows, int64_t count, float* floats,
                       std::span<float> shares);

}  // namespace sqz
