#include "training/transformer.h"

#include <algorithm>
#include <functional>

namespace sqz::training {

std::unique_ptr<KvCache> Transformer::make_cache() const {
  return device().is_cpu() ? make_cpu_cache(config_.description)
                           : make_torch_cache(config_.description);
}

at::Tensor Transformer::embed(std::span<const int32_t> tokens) const {
  const at::Tensor ids = at::empty({static_cast<int64_t>(tokens.size())}, at::kLong);
  std::copy(tokens.begin(), tokens.end(), ids.data_ptr<int64_t>());
  return weights_.embedding.index_select(0, ids.to(device())).to(weights_.norm.scalar_type());
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
  at::Tensor gate = by_rows(gate_up.narrow(1, 0, width), at::silu_out);
  x.add_(apply(layer.down, gate.mul_(gate_up.narrow(1, width, width))));
}

Result<AttentionState> Transformer::attend_context(int64_t l, FixedContext& context,
                                                   std::span<const int64_t> indptr,
                                                   std::span<const int64_t> positions,
                                                   const at::Tensor& q) {
  const int64_t heads = q.size(1), dim = q.size(2);
  const bool here = context.device().has_value() && q.is_cuda();
  const DType dtype = here && q.size(0) > 1 ? context.device_dtype() : DType::kF32;
  const at::Tensor queries =
      q.to(here ? q.device() : at::Device(at::kCPU), scalar_type(dtype)).contiguous();
  const at::Tensor out = at::empty_like(queries);
  const at::Tensor lse = at::empty({q.size(0), heads}, queries.options().dtype(at::kFloat));
  const auto at_row = [&](const at::Tensor& tensor, int64_t row) {
    return static_cast<std::byte*>(tensor.data_ptr()) + row * heads * dim * dtype_size(dtype);
  };
  // As many requests at a time as one call takes. A longer request goes by itself, in pieces.
  for (size_t r = 0, end = 0; r < positions.size(); r = end) {
    end = r + 1;
    while (end < positions.size() && indptr[end + 1] - indptr[r] <= kMaxContextTokens) ++end;
    for (int64_t first = indptr[r]; first < indptr[end]; first += kMaxContextTokens) {
      const int64_t count = std::min(kMaxContextTokens, indptr[end] - first);
      std::vector<int64_t> cut;
      for (size_t i = r; i <= end; ++i) cut.push_back(std::min(indptr[i] - indptr[r], count));
      const int64_t begin = positions[r] + first - indptr[r];
      SQZ_RETURN_IF_ERROR(context.attend(
          l, {.dtype = dtype,
              .q = at_row(queries, first),
              .out = at_row(out, first),
              .lse = lse.data_ptr<float>() + first * heads,
              .heads = heads,
              .dim = dim,
              .indptr = cut,
              .first = end == r + 1 ? std::span(&begin, 1) : positions.subspan(r, end - r)}));
    }
  }
  return AttentionState{out.to(q.device(), at::kFloat), lse.to(q.device())};
}

Status Transformer::run_layer(int64_t l, const Step& step, std::span<KvCache* const> caches) const {
  const LayerWeights& layer = weights_.layers[static_cast<size_t>(l)];
  const ModelDescription& model = config_.description;
  const int64_t count = step.x.size(0);
  const std::vector<int64_t> indptr =
      step.indptr.empty() ? std::vector<int64_t>{0, count} : step.indptr;
  std::vector<int64_t> bases, positions;  // of the requests, among their own tokens and in all
  for (size_t r = 0; r < caches.size(); ++r) {
    bases.push_back(caches[r]->size());
    positions.push_back(bases[r] + (step.context == nullptr ? 0 : step.context->tokens()));
    caches[r]->resize(bases[r] + indptr[r + 1] - indptr[r]);
  }
  const at::Tensor queries =
      at::empty({count, model.query_heads, model.head_dim}, step.x.options());
  const bool on_cpu = device().is_cpu();
  const auto each_block = [&](const std::function<void(int64_t, int64_t)>& body) {
    if (on_cpu) return for_blocks(count, step.block, body);
    for (int64_t first = 0; first < count; first += step.block) {
      body(first, std::min(step.block, count - first));
    }
  };
  // Calls body(cache, first among its tokens, first, length) for each request's part of a block.
  const auto each_request = [&](int64_t first, int64_t length, const auto& body) {
    for (size_t r = 0; r < caches.size(); ++r) {
      const int64_t begin = std::max(first, indptr[r]);
      const int64_t end = std::min(first + length, indptr[r + 1]);
      if (begin < end) body(*caches[r], bases[r] + begin - indptr[r], begin, end - begin);
    }
  };
  each_block([&](int64_t first, int64_t length) {
    const at::Tensor x = step.x.narrow(0, first, length);
    const Projection projection = project(layer, x, step.rope.narrow(first, length));
    each_request(first, length, [&](KvCache& cache, int64_t own, int64_t begin, int64_t tokens) {
      cache.write(own, projection.k.narrow(0, begin - first, tokens),
                  projection.v.narrow(0, begin - first, tokens));
    });
    queries.narrow(0, first, length).copy_(projection.q);
    if (step.observer != nullptr) step.observer->projected(first, x, projection);
  });

  AttentionState fixed;
  if (step.context != nullptr) {
    SQZ_ASSIGN_OR_RETURN(fixed, attend_context(l, *step.context, indptr, positions, queries));
    if (step.answered) SQZ_RETURN_IF_ERROR(step.answered(l, queries, fixed, *caches[0]));
  }
  if (l + 1 == model.layers && !step.last_output) return {};
  const int64_t window = model.sliding_window[static_cast<size_t>(l)];
  const auto attend_own = [&](int64_t first, int64_t length) {
    std::vector<AttentionState> parts;
    each_request(first, length, [&](KvCache& cache, int64_t own, int64_t begin, int64_t tokens) {
      parts.push_back(cache.attend(queries.narrow(0, begin, tokens), own, window));
    });
    if (parts.size() == 1) return parts[0];
    std::vector<at::Tensor> outs, lses;
    for (const AttentionState& part : parts) {
      outs.push_back(part.out);
      lses.push_back(part.lse);
    }
    return AttentionState{at::cat(outs), at::cat(lses)};
  };
  AttentionState all;  // on a GPU: one call for all tokens fills it better
  if (!on_cpu) all = attend_own(0, count);
  each_block([&](int64_t first, int64_t length) {
    at::Tensor x = step.x.narrow(0, first, length);
    AttentionState state =
        on_cpu ? attend_own(first, length)
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
