// Selection of whole buckets (partition `buckets`) by a score: the best are read until the share of
// the keys that was asked for is full. What is read to score them is the model's, like its weights:
// it does not count in the budget. A selector is a scorer and its name: saap.cc, kmeans.cc.
#pragma once

#include <memory>
#include <span>

#include "libruntime/select/registry.h"

namespace sqz {

class BucketScorer {
 public:
  virtual ~BucketScorer() = default;
  // Workspace of score(), of a layer with buckets.
  virtual int64_t floats(const LayerView& view) const = 0;
  // One score for each of the view's buckets, from queries before RoPE; what is told of empty ones
  // does not matter. Allocation-free.
  virtual void score(const SelectQuery& query, float* floats, std::span<float> scores) const = 0;
};

// `name` is the selector's, for messages. kNumeric at select() for a score that is NaN or
// +infinity.
Result<PreparedSelector> prepare_buckets(const SelectorInputs& inputs,
                                         const SelectionRequest& request, const char* name,
                                         std::unique_ptr<BucketScorer> scorer);

}  // namespace sqz
