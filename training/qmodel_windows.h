// The windows of text that a classifier is trained on, and their queries and keys.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "training/qmodel.h"
#include "training/qmodel_samples.h"

namespace sqz::training {

// In the order of the texts. The rest of a text, or a text shorter than a window, is a window if it
// has at least half as many tokens.
std::vector<TokenText> cut_windows(std::span<const TokenText> texts, const QmodelOptions& options);

// A permutation of 0 .. count - 1.
std::vector<int64_t> shuffled(int64_t count, uint64_t seed);

// Draws up to `most` different tokens of a window of `tokens`, from `first` on, ascending.
std::vector<int64_t> draw_positions(int64_t first, int64_t tokens, int64_t most, uint64_t seed);

struct WindowPass {
  std::vector<int64_t> positions;             // of the queries
  std::vector<int64_t> layers;                // ascending; the other layers are skipped
  at::Device device = at::kCPU;               // of the tensors of WindowLayer
  std::function<void(double done)> progress;  // fraction of this pass; may be empty
};
// Calls body(i, layer) for pass.layers[i], in order. kNumeric if a key or query is not finite.
Status run_window(Runner& runner, const TokenText& window, const WindowPass& pass,
                  const std::function<Status(int64_t, const WindowLayer&)>& body);

}  // namespace sqz::training
