// How much the attention of each layer changes the hidden state (SqueezeAttention, section 3): the
// cosine between the state before the layer's input norm and the state after the attention's
// residual add, averaged over the tokens of one or more texts. Near 1, attention added little.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

class Runner;
struct LayerCapture;

// Cosines of neighbouring tokens are alike, so the standard error comes from the means of so many
// consecutive tokens, as if those were independent.
inline constexpr int64_t kProfileBlock = 128;
inline constexpr double kProfileStep = 0x1p-20;  // means are multiples of it

struct ProfileText {
  std::string name;  // opens messages: "book.txt"
  std::vector<int32_t> tokens;
};

struct ProfileOptions {
  int64_t window = 16384;  // tokens of a dense pass, from 1: memory grows with it, not with a text
  int64_t windows = 1;     // passes over each text at most, from its start; 0: as many as it fills
  // Sees what each pass captures, layer by layer: keys and values, the queries of the pass's last
  // `tail_queries` tokens, and attention if asked for. `window` counts passes from 0; they take the
  // texts in order. May be empty; an error stops the profile.
  std::function<Status(int64_t window, const LayerCapture&)> consumer;
  int64_t tail_queries = 0;
  bool attention = false;  // LayerCapture::attention
  // Fraction of the work, 0 .. 1; called after each layer; an error stops the profile. May be
  // empty.
  std::function<Status(double done)> progress;
};

// Every token counts the same, whichever its text and window.
struct LayerProfile {
  std::vector<double> cosine;        // [layers], in [-1, 1]
  std::vector<double> cosine_error;  // [layers], standard error of `cosine`
  int64_t tokens = 0;                // averaged over
  int64_t windows = 0;               // passes; each begins at position 0, the last of a text may be
                                     // shorter
};

// One dense pass a window; [window, hidden] states and one layer's keys and values are in memory.
// kCorrupt if the texts together are shorter than two blocks, from which no error can be told;
// kNumeric if a cosine is NaN; else what Runner::prefill() refuses.
Result<LayerProfile> profile_layers(Runner& runner, std::span<const ProfileText> texts,
                                    const ProfileOptions& options);

}  // namespace sqz
