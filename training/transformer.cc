#include "training/transformer.h"

namespace sqz::training {

std::unique_ptr<KvCache> Transformer::make_cache() const {
  return device().is_cpu() ? make_cpu_cache(config_.description)
                           : make_torch_cache(config_.description);
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

Status Transformer::step(int64_t l, at::Tensor x, const RopeTable& rope, KvCache& cache,
                         const ContextStep& context, LayerTaps* taps, bool keys_only) const {
  const LayerWeights& layer = weights_.layers[static_cast<size_t>(l)];
  const ModelDescription& model = config_.description;
  const int64_t count = x.size(0), dim = model.head_dim;
  const at::Tensor qkv = apply(layer.qkv, norm(x, layer.input_norm))
                             .view({count, model.query_heads + 2 * model.kv_heads, dim});
  at::Tensor q = qkv.narrow(1, 0, model.query_heads);
  at::Tensor k = qkv.narrow(1, model.query_heads, model.kv_heads);
  const at::Tensor v = qkv.narrow(1, model.query_heads + model.kv_heads, model.kv_heads);
  if (config_.qk_norm) {
    q = norm(q, layer.q_norm);
    k = norm(k, layer.k_norm);
  }
  if (taps != nullptr && taps->want_pre_rope) {
    taps->queries_pre_rope = q;
    taps->keys_pre_rope = k;
  }
  q = apply_rope(q, rope);
  k = apply_rope(k, rope);
  if (taps != nullptr) {
    taps->queries = q;
    taps->keys = k;
    taps->values = v;
  }
  cache.append(k, v);
  if (keys_only) return {};

  at::Tensor attended;
  SQZ_RETURN_IF_ERROR(attend(l, q, cache, context, attended));
  const at::Tensor delta = apply(layer.o, attended);
  if (taps != nullptr && taps->want_cosine) {
    const at::Tensor before = x.to(at::kFloat);
    taps->cosine = at::cosine_similarity(before, before + delta, 1);
  }
  x.add_(delta);

  at::Tensor gate_up = apply(layer.gate_up, norm(x, layer.attention_norm));
  const int64_t width = config_.intermediate_size;
  at::Tensor gate = gate_up.narrow(1, 0, width).contiguous();
  at::silu_(gate).mul_(gate_up.narrow(1, width, width));
  x.add_(apply(layer.down, gate));
  return {};
}

Status Transformer::attend(int64_t l, const at::Tensor& q, KvCache& cache,
                           const ContextStep& context, at::Tensor& out) const {
  AttentionState own = cache.attend(q, config_.description.sliding_window[static_cast<size_t>(l)]);
  if (context.context != nullptr) {
    const at::Tensor queries = q.to(at::kCPU, at::kFloat).contiguous();
    AttentionState fixed{at::empty_like(queries),
                         at::empty({q.size(0), q.size(1)}, queries.options())};
    SQZ_RETURN_IF_ERROR(
        context.context->attend(l, context.first, q.size(0), queries.data_ptr<float>(),
                                fixed.out.data_ptr<float>(), fixed.lse.data_ptr<float>()));
    merge_states(own, {fixed.out.to(q.device()), fixed.lse.to(q.device())});
  }
  out = own.out.view({q.size(0), -1}).to(q.scalar_type());
  return {};
}

at::Tensor Transformer::logits(const at::Tensor& x) const {
  return apply({weights_.lm_head, {}}, norm(x, weights_.norm)).to(at::kCPU, at::kFloat);
}

}  // namespace sqz::training
