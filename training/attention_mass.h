// The attention that each token of a text gets from all tokens of the text, which ranks heavy
// hitters (H2O). It costs as much as the scores of a dense pass, and makes no N x N matrix.
#pragma once

#include "formats/model_description.h"
#include "training/aten.h"

namespace sqz::training {

// q: [N, Hq, d], k: [N, Hkv, d], after RoPE, on any device. Token t sees the tokens up to t; if
// window > 0, the last `window` of these. Returns [Hkv, N] float32 on the CPU: the softmax weights,
// summed over tokens and the heads of the group. The result does not depend on the number of
// threads.
at::Tensor attention_mass(const at::Tensor& q, const at::Tensor& k, const ModelDescription& model,
                          int64_t window);

}  // namespace sqz::training
