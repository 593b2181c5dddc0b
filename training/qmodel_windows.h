// The stretches of text that a query classifier is trained on, and what the model makes of them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "training/qmodel.h"
#include "training/qmodel_samples.h"

namespace sqz::training {

struct QmodelWindow {
  std::string name;  // of its text
  std::vector<int32_t> tokens;
};

// In the order of the texts. What is left of a text, and a text shorter than a window, is a window
// if it has half as many tokens.
std::vector<QmodelWindow> cut_windows(std::span<const QmodelText> texts,
                                      const QmodelOptions& options);

// A permutation of 0 .. count - 1.
std::vector<int64_t> shuffled(int64_t count, uint64_t seed);

// Up to `most` different tokens of a window of `tokens`, ascending, none before `first`.
std::vector<int64_t> draw_positions(int64_t first, int64_t tokens, int64_t most, uint64_t seed);

struct WindowPass {
  std::vector<int64_t> positions;               // of the queries
  std::vector<int64_t> layers;                  // ascending; others are passed over
  at::Device device = at::kCPU;                 // where the consumer gets its tensors
  std::function<Status(double done)> progress;  // fraction of this pass; may be empty
};
// body(i, layer) for each of pass.layers, i counting from 0. kNumeric if a key or query is not
// finite.
Status run_window(Runner& runner, const QmodelWindow& window, const WindowPass& pass,
                  const std::function<Status(int64_t, const WindowLayer&)>& body);

}  // namespace sqz::training
