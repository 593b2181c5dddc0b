// Loads the tensors of a model from a checkpoint to a device, in a dtype.
#pragma once

#include <vector>

#include "formats/checkpoint.h"
#include "training/aten.h"
#include "training/linear.h"

namespace sqz::training {

// LibTorch's name of BF16 and F16, and float32 for other types.
at::ScalarType scalar_type(DType dtype);

struct LayerWeights {
  at::Tensor input_norm, attention_norm;  // [hidden]; before attention, before the MLP
  at::Tensor q_norm, k_norm;              // [d], Qwen3 only
  Linear qkv;                             // [(Hq + 2 Hkv) d, hidden]: q, k, v stacked
  Linear o, gate_up, down;                // gate_up: gate, up stacked
};

// In the type that the model computes in. On a CPU, matrices keep the 16 bits of the file.
struct ModelWeights {
  at::Tensor embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  at::Tensor norm;     // [hidden]
  at::Tensor lm_head;  // [vocab, hidden]; the embedding if tied
};

// Throws if LibTorch does.
ModelWeights load_weights(const Checkpoint& checkpoint, at::Device device, at::ScalarType dtype);

}  // namespace sqz::training
