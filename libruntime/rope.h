// Rotary position embedding as a reader of queries sees it: what turned them, and how to undo it.
// Angles are computed in float32, step by step as Hugging Face does (training/rope.h): weights were
// trained with that.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/model_description.h"

namespace sqz {

// [d / 2] radians a token, scaling included.
std::vector<float> rope_frequencies(const RopeDescription& rope, int64_t head_dim);

// Turns vectors back. Thread-safe.
class RopeUndo {
 public:
  RopeUndo(const RopeDescription& rope, int64_t head_dim);

  // rows: [count, d] after RoPE at `position`, pairs (i, i + d / 2) -> out [count, d], before it.
  // `out` may be `rows`. `angles`: [d] floats of workspace.
  void apply(int64_t position, const float* rows, int64_t count, float* angles, float* out) const;

  // cos and sin of position * frequencies(), times shrink(), are what apply() turns by.
  const std::vector<float>& frequencies() const { return frequencies_; }
  float shrink() const { return shrink_; }

 private:
  std::vector<float> frequencies_;
  float shrink_;  // 1 / the factor that cosines and sines were multiplied by
};

}  // namespace sqz
