// How much the attention of each layer changes the hidden state (SqueezeAttention, section 3): the
// cosine between the state before the layer's input norm and the state after the attention's
// residual add, averaged over the tokens of one or more texts. Near 1, attention added little.
#pragma once

#include "formats/layers_file.h"
#include "training/runner.h"

namespace sqz {

// Cosines of neighbouring tokens are alike. So the standard error comes from the means of blocks of
// so many tokens, as if these means were independent.
inline constexpr int64_t kProfileBlock = 128;
inline constexpr double kProfileStep = 0x1p-20;  // means are multiples of it

struct ProfileOptions {
  int64_t window = 16384;  // tokens of a dense pass, from 1: memory grows with it, not with a text
  int64_t windows = 1;     // passes over each text at most, from its start; 0: as many as it fills
  // Gets each layer of each pass: keys and values, the queries of the last `tail_queries` tokens,
  // and attention if asked for. `window` counts passes from 0, in the order of the texts. May be
  // empty. An error stops the profile.
  std::function<Status(int64_t window, const LayerCapture&)> consumer;
  int64_t tail_queries = 0;
  bool attention = false;  // LayerCapture::attention
  // Gets the fraction of the work, 0 .. 1, after each layer.
  std::function<void(double done)> progress = [](double) {};
};

// Fills model, texts, windows, window, tokens, cosine and cosine_error, where every token counts
// the same. Runs one dense pass a window. The hidden states and the keys and values of one layer
// are in memory. kCorrupt if the texts together are shorter than two blocks, because these have no
// standard error. kNumeric if a cosine is NaN. Other errors are those of Runner::prefill().
Result<LayersFile> profile_layers(Runner& runner, std::span<const TokenText> texts,
                                  const ProfileOptions& options);

}  // namespace sqz
