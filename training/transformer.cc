#include "training/transformer.h"

#include <algorithm>
#include <functional>

namespace sqz::training {

std::unique_ptr<KvCache> Transformer::make_cache() const {
  return device().is_cpu() ? make_cpu_cache(config_.description)
                           : make_torch_cache(config_.description);
}

void Transformer::wait_for_weights() const {
  // The last to be loaded; reading an element waits for what is on the default stream.
  weights_.norm.select(0, 0).item();
}

at::Tensor Transformer::embed(std::span<const int32_t> tokens) const {
  const at::Tensor ids = at::empty({static_cast<int64_t>(tokens.size())}, at::kLong);
  std::copy(tokens.begin(), tokens.end(), ids.data_ptr<int64_t>());
  return weights_.embedding.index_select(0, ids.to(device()));
}

RopeTable Transformer::rope(int64_t first, int64_t count) const {
  const ModelDescription& model = config_.description;
  const RopeTable table = rope_table(model.rope, model.head_dim, first, count);
  return {table.cos.to(device()), table.sin.to(device())};
}

// RMS norm over the last dimension: in float32, rounded, then times the weight.
at::Tensor Transformer::norm(const at::Tensor& x, const at::Tensor& weight) const {
  const at::Tensor x32 = x.to(at::kFloat);
  const at::Tensor scale =
      at::mean(x32 * x32, {-1}, /*keepdim=*/true).add_(config_.rms_norm_eps).rsqrt_();
  return (x32 * scale).to(x.scalar_type()).mul_(weight);
}

Projection Transformer::project(const LayerWeights& layer, const at::Tensor& x,
                                const RopeTable& rope) const {
  const ModelDescription& model = config_.description;
  const at::Tensor qkv =
      apply(layer.qkv, norm(x, layer.input_norm))
          .view({x.size(0), model.query_heads + 2 * model.kv_heads, model.head_dim});
  Projection out;
  out.q_pre_rope = qkv.narrow(1, 0, model.query_heads);
  out.k_pre_rope = qkv.narrow(1, model.query_heads, model.kv_heads);
  out.v = qkv.narrow(1, model.query_heads + model.kv_heads, model.kv_heads);
  if (config_.qk_norm) {
    out.q_pre_rope = norm(out.q_pre_rope, layer.q_norm);
    out.k_pre_rope = norm(out.k_pre_rope, layer.k_norm);
  }
  out.q = apply_rope(out.q_pre_rope, rope);
  out.k = apply_rope(out.k_pre_rope, rope);
  return out;
}

void Transformer::mlp(const LayerWeights& layer, at::Tensor& x) const {
  const at::Tensor gate_up = apply(layer.gate_up, norm(x, layer.attention_norm));
  const int64_t width = config_.intermediate_size;
  at::Tensor gate = at::silu(gate_up.narrow(1, 0, width));
  x.add_(apply(layer.down, gate.mul_(gate_up.narrow(1, width, width))));
}

Result<AttentionState> Transformer::attend_context(int64_t l, const Step& step,
                                                   const at::Tensor& q) {
  const at::Tensor queries = q.to(at::kCPU, at::kFloat).contiguous();
  AttentionState fixed{at::empty_like(queries),
                       at::empty({q.size(0), q.size(1)}, queries.options())};
  const int64_t heads = q.size(1), dim = q.size(2);
  for (int64_t first = 0; first < q.size(0); first += kMaxContextTokens) {
    const int64_t count = std::min(kMaxContextTokens, q.size(0) - first);
    SQZ_RETURN_IF_ERROR(step.context->attend(l, step.position + first, count,
                                             queries.data_ptr<float>() + first * heads * dim,
                                             fixed.out.data_ptr<float>() + first * heads * dim,
                                             fixed.lse.data_ptr<float>() + first * heads));
  }
  return AttentionState{fixed.out.to(q.device()), fixed.lse.to(q.device())};
}

Status Transformer::run_layer(int64_t l, const Step& step, KvCache& cache) const {
  const LayerWeights& layer = weights_.layers[static_cast<size_t>(l)];
  const ModelDescription& model = config_.description;
  const int64_t count = step.x.size(0), base = cache.size();
  cache.resize(base + count);
  const at::Tensor queries =
      at::empty({count, model.query_heads, model.head_dim}, step.x.options());
  const bool on_cpu = device().is_cpu();
  const auto each_block = [&](const std::function<void(int64_t, int64_t)>& body) {
    if (on_cpu) return for_blocks(count, step.block, body);
    for (int64_t first = 0; first < count; first += step.block) {
      body(first, std::min(step.block, count - first));
    }
  };
  each_block([&](int64_t first, int64_t length) {
    const at::Tensor x = step.x.narrow(0, first, length);
    const Projection projection = project(layer, x, step.rope.narrow(first, length));
    cache.write(base + first, projection.k, projection.v);
    queries.narrow(0, first, length).copy_(projection.q);
    if (step.observer != nullptr) step.observer->projected(first, x, projection);
  });

  AttentionState fixed;
  if (step.context != nullptr) {
    SQZ_ASSIGN_OR_RETURN(fixed, attend_context(l, step, queries));
  }
  const bool last = l + 1 == model.layers;
  const int64_t window = model.sliding_window[static_cast<size_t>(l)];
  const auto needed = [&](int64_t first, int64_t length) {
    return !last || step.observer == nullptr || step.observer->needs_output(l, first, length);
  };
  AttentionState all;  // of a GPU: one call for all tokens, which its kernels want
  if (!on_cpu && needed(0, count)) all = cache.attend(queries, base, window);
  each_block([&](int64_t first, int64_t length) {
    if (!needed(first, length)) return;
    at::Tensor x = step.x.narrow(0, first, length);
    AttentionState state =
        on_cpu ? cache.attend(queries.narrow(0, first, length), base + first, window)
               : AttentionState{all.out.narrow(0, first, length), all.lse.narrow(0, first, length)};
    if (step.context != nullptr) {
      merge_states(state, {fixed.out.narrow(0, first, length), fixed.lse.narrow(0, first, length)});
    }
    const at::Tensor delta = apply(layer.o, state.out.view({length, -1}).to(x.scalar_type()));
    if (step.observer != nullptr) step.observer->attended(first, x, delta);
    x.add_(delta);
    mlp(layer, x);
  });
  return {};
}

at::Tensor Transformer::logits(const at::Tensor& x) const {
  return apply({weights_.lm_head, {}}, norm(x, weights_.norm)).to(at::kCPU, at::kFloat);
}

}  // namespace sqz::training
