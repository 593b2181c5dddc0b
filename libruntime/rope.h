// Undoes the rotary position embedding of queries, or turns them back by some positions. Angles are
// computed in float32, step by step as Hugging Face does (training/rope.h), because the weights
// were trained with these angles.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/model_description.h"

namespace sqz {

// Radians a token, [d / 2] or half the rotary_dim, with the scaling of long contexts.
std::vector<float> rope_frequencies(const RopeDescription& rope, int64_t head_dim);

// Thread-safe.
class RopeUndo {
 public:
  RopeUndo(const RopeDescription& rope, int64_t head_dim);
  // apply() turns rows back by `position` tokens and leaves their length.
  static RopeUndo shift(const RopeDescription& rope, int64_t head_dim);

  // out [count, d] = rows [count, d] before RoPE; the rows were turned at `position`, in pairs
  // (i, i + d / 2), or of the first rotary_dim dimensions. `out` may be `rows`. `workspace`:
  // [d] floats.
  void apply(int64_t position, const float* rows, int64_t count, float* workspace,
             float* out) const;

  // apply() turns by the cosines and sines of position * frequencies(), times shrink(), each [d /
  // 2].
  void angles(int64_t position, float* cosines, float* sines) const;
  const std::vector<float>& frequencies() const { return frequencies_; }
  float shrink() const { return shrink_; }

 private:
  int64_t dim_;
  std::vector<float> frequencies_;
  float shrink_;  // 1 / the factor that cosines and sines were multiplied by
};

}  // namespace sqz
