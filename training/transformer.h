// One decoder layer of Llama, Mistral, Qwen2 and Qwen3, applied to consecutive tokens. The dense
// pass and generation are loops over layers; they differ in the caches that they keep.
#pragma once

#include <span>
#include <vector>

#include "training/aten.h"
#include "training/attention.h"
#include "training/rope.h"
#include "training/runner.h"
#include "training/weights.h"

namespace sqz::training {

// Queries, keys and values of a block of tokens in a layer: [T, heads, d], in the model's dtype.
struct Projection {
  at::Tensor q, k, v;
  at::Tensor q_pre_rope, k_pre_rope;
};

// Observes a layer, block by block. Several threads call it, each with other tokens.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // `x` [T, hidden]: the layer's input.
  virtual void projected(int64_t first, const at::Tensor& x, const Projection& projection) = 0;
  // The state before attention, and the output of attention that is added to it: [T, hidden].
  virtual void attended(int64_t first, const at::Tensor& before, const at::Tensor& delta) = 0;
};

// Tokens that go through the layers together.
struct Step {
  at::Tensor x;                     // [T, hidden], updated in place
  RopeTable rope;                   // of these T tokens
  int64_t block = 0;                // tokens that one thread takes at a time
  FixedContext* context = nullptr;  // in front of all tokens of the caches; may be null
  LayerObserver* observer = nullptr;
  bool last_output = true;  // false: the last layer's attention and MLP are left out
  // Gets the queries [T, Hq, d] of each layer, the state of the context for them, and the cache,
  // which has the keys and values of all T tokens. For one request; may be empty.
  std::function<Status(int64_t layer, const at::Tensor& q, const AttentionState& context,
                       const KvCache& own)>
      answered;
  // Request r has tokens indptr[r] .. indptr[r + 1] - 1. Empty: one request has all tokens.
  std::vector<int64_t> indptr;
};

class Transformer {
 public:
  Transformer(const ModelConfig& config, ModelWeights weights)
      : config_(config), weights_(std::move(weights)) {}

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  at::Device device() const { return weights_.embedding.device(); }
  std::unique_ptr<KvCache> make_cache() const;

  at::Tensor embed(std::span<const int32_t> tokens) const;  // [T, hidden]
  RopeTable rope(int64_t first, int64_t count) const;       // on the model's device

  // Runs one layer for all tokens of `step`. caches[r] has the earlier tokens of request r, and
  // gets the new ones.
  Status run_layer(int64_t layer, const Step& step, std::span<KvCache* const> caches) const;

  at::Tensor logits(const at::Tensor& x) const;  // [T, hidden] -> [T, vocab] float32, on the CPU

 private:
  at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const;
  Projection project(const LayerWeights& layer, const at::Tensor& x, const RopeTable& rope) const;
  void mlp(const LayerWeights& layer, at::Tensor& x) const;
  // Returns the state of `q` [T, Hq, d] over the fixed context. Request r begins at positions[r].
  static Result<AttentionState> attend_context(int64_t layer, FixedContext& context,
                                               std::span<const int64_t> indptr,
                                               std::span<const int64_t> positions,
                                               const at::Tensor& q);

  ModelConfig config_;
  ModelWeights weights_;
};

}  // namespace sqz::training
