// How much attention each token of a text gets from all tokens of the text, itself included: what
// heavy hitters (H2O) are told by. It is a second look at queries and keys, as costly as the scores
// of a dense pass; never an N x N matrix.
#pragma once

#include "formats/model_description.h"
#include "training/aten.h"

namespace sqz::training {

// q: [N, Hq, d], k: [N, Hkv, d], after RoPE, on any device; token t sees the tokens up to t, of
// those the last `window` only if window > 0. Returns [Hkv, N] float32 on the CPU: the softmax
// weights summed over tokens and the heads of the group, Hkv N group in all. Does not depend on the
// number of threads.
at::Tensor attention_mass(const at::Tensor& q, const at::Tensor& k, const ModelDescription& model,
                          int64_t window);

}  // namespace sqz::training
