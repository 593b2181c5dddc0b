// The description of a small model, for what is made without one.
#pragma once

#include <cmath>

#include "formats/model_description.h"

namespace sqz::testing {

// Full attention in every layer, 4096 positions.
inline ModelDescription tiny_model(int64_t layers, int64_t query_heads, int64_t kv_heads,
                                   int64_t head_dim) {
  ModelDescription model;
  model.architecture = "LlamaForCausalLM";
  model.layers = layers;
  model.query_heads = query_heads;
  model.kv_heads = kv_heads;
  model.head_dim = head_dim;
  model.hidden_size = query_heads * head_dim;
  model.vocab_size = 1000;
  model.max_positions = 4096;
  model.sliding_window.assign(static_cast<size_t>(layers), 0);
  model.weights_hash = "0123456789abcdef";
  model.attention_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  return model;
}

}  // namespace sqz::testing
