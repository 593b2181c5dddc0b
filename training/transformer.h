// One decoder layer of Llama, Mistral, Qwen2 and Qwen3, applied to a run of tokens. The dense pass
// and generation are both loops over this: they differ in who keeps the caches.
#pragma once

#include <ATen/ATen.h>

#include <span>

#include "training/attention.h"
#include "training/rope.h"
#include "training/runner.h"
#include "training/weights.h"

namespace sqz::training {

// What a caller wants to see of a layer; tensors are filled in the model's dtype. [T, heads, d].
struct LayerTaps {
  bool want_pre_rope = false, want_cosine = false;
  at::Tensor queries, keys, values;
  at::Tensor queries_pre_rope, keys_pre_rope;
  at::Tensor cosine;  // [T] float32
};

// A fixed context in front of the caches' tokens: `first` is the position of the step's first
// token.
struct ContextStep {
  FixedContext* context = nullptr;
  int64_t first = 0;
};

class Transformer {
 public:
  Transformer(const ModelConfig& config, ModelWeights weights)
      : config_(config), weights_(std::move(weights)) {}

  const ModelConfig& config() const { return config_; }
  at::Device device() const { return weights_.embedding.device(); }
  std::unique_ptr<KvCache> make_cache() const;

  at::Tensor embed(std::span<const int32_t> tokens) const;  // [T, hidden]
  RopeTable rope(int64_t first, int64_t count) const;       // on the model's device

  // x [T, hidden] -> the layer's output, in place; keys and values are appended to `cache`.
  // `keys_only` stops after that and leaves x as it is: enough for a last layer whose output
  // nobody asked for.
  Status step(int64_t layer, at::Tensor x, const RopeTable& rope, KvCache& cache,
              const ContextStep& context, LayerTaps* taps, bool keys_only = false) const;

  at::Tensor logits(const at::Tensor& x) const;  // [T, hidden] -> [T, vocab] float32, on the CPU

 private:
  at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const;
  Status attend(int64_t layer, const at::Tensor& q, KvCache& cache, const ContextStep& context,
                at::Tensor& out) const;

  ModelConfig config_;
  ModelWeights weights_;
};

}  // namespace sqz::training
