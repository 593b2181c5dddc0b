#include <algorithm>

#include "training/model_runner.h"

namespace sqz::training {
namespace {

constexpr int64_t kLogitRows = 64;  // of the vocabulary's width, in memory at once

// Passes calls on to a context, and shows an observer both states: over the context, and of the
// tokens' attention to each other.
class ObservedContext final : public FixedContext, public LayerObserver {
 public:
  ObservedContext(const Transformer& transformer, FixedContext& inner, const ScoreOptions& options,
                  int64_t count)
      : model_(transformer.config().description),
        inner_(inner),
        options_(options),
        own_(transformer.make_cache()) {
    own_->resize(count);
  }

  int64_t tokens() const override { return inner_.tokens(); }

  std::optional<int> device() const override { return inner_.device(); }
  DType device_dtype() const override { return inner_.device_dtype(); }

  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override {
    const int64_t indptr[] = {0, count};
    return attend_requests(layer, {.q = q,
                                   .out = out,
                                   .lse = lse,
                                   .heads = model_.query_heads,
                                   .dim = model_.head_dim,
                                   .indptr = indptr,
                                   .first = {&first, 1}});
  }

  // There is one request. The observer gets float32 on the host.
  Status attend_requests(int64_t layer, const ContextQueries& queries) override {
    SQZ_RETURN_IF_ERROR(inner_.attend_requests(layer, queries));
    const int64_t first = queries.first.front(), count = queries.indptr.back();
    const auto place =
        device() ? at::Device(at::kCUDA, static_cast<int8_t>(*device())) : at::Device(at::kCPU);
    const auto tensor = [&](const void* data, at::IntArrayRef shape, DType dtype) {
      return at::from_blob(const_cast<void*>(data), shape,
                           at::device(place).dtype(scalar_type(dtype)));
    };
    const at::Tensor q = tensor(queries.q, {count, queries.heads, queries.dim}, queries.dtype);
    const at::Tensor out = tensor(queries.out, q.sizes(), queries.dtype);
    const at::Tensor lse = tensor(queries.lse, {count, queries.heads}, DType::kF32);
    const at::Tensor keys = own_->keys();  // undefined in a CPU cache
    const AttentionState own =
        own_->attend(keys.defined() ? q.to(keys.options()) : q, first - inner_.tokens(),
                     model_.sliding_window[static_cast<size_t>(layer)]);
    const auto host = [](const at::Tensor& x) { return x.to(at::kCPU, at::kFloat).contiguous(); };
    const at::Tensor host_q = host(q), host_out = host(out), host_lse = host(lse);
    const at::Tensor own_out = host(own.out), own_lse = host(own.lse);
    return options_.observer({.layer = layer,
                              .first = first,
                              .count = count,
                              .queries = host_q.data_ptr<float>(),
                              .context_out = host_out.data_ptr<float>(),
                              .context_lse = host_lse.data_ptr<float>(),
                              .own_out = own_out.data_ptr<float>(),
                              .own_lse = own_lse.data_ptr<float>()});
  }

  void projected(int64_t first, const at::Tensor&, const Projection& projection) override {
    own_->write(first, projection.k, projection.v);
  }
  void attended(int64_t, const at::Tensor&, const at::Tensor&) override {}
  bool needs_output(int64_t, int64_t, int64_t) const override { return true; }

 private:
  const ModelDescription& model_;
  FixedContext& inner_;
  const ScoreOptions& options_;
  std::unique_ptr<KvCache> own_;  // of the layer at hand
};

Result<std::vector<double>> token_losses(const Transformer& transformer, const at::Tensor& x,
                                         std::span<const int32_t> targets, int64_t first) {
  std::vector<double> out;
  for (int64_t row = 0; row < x.size(0); row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, x.size(0) - row);
    const at::Tensor logits = transformer.logits(x.narrow(0, row, rows));
    SQZ_RETURN_IF_ERROR(check_finite(logits, first + row));
    const at::Tensor normalisers = logits.to(at::kDouble).logsumexp(1);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t target = targets[static_cast<size_t>(row + i)];
      out.push_back(normalisers[i].item<double>() - logits[i][target].item<double>());
    }
  }
  return out;
}

}  // namespace

Result<std::vector<double>> ModelRunner::score(std::span<const int32_t> tokens,
                                               FixedContext& context, const ScoreOptions& options) {
  return guarded([&]() -> Result<std::vector<double>> {
    const int64_t first = context.tokens();
    SQZ_RETURN_IF_ERROR(check_tokens(config().description, tokens, first));
    if (options.losses && tokens.size() < 2) {
      return Status(Code::kInvalidArgument,
                    "1 token to score: expected 2 or more, the first has no loss");
    }
    const auto inputs = options.losses ? tokens.first(tokens.size() - 1) : tokens;
    const auto count = static_cast<int64_t>(inputs.size());
    std::unique_ptr<ObservedContext> observed;
    if (options.observer) {
      observed = std::make_unique<ObservedContext>(transformer_, context, options, count);
    }
    Step step;
    step.x = transformer_.embed(inputs);
    step.rope = transformer_.rope(first, count);
    step.block = kDefaultChunk;
    step.context = observed ? observed.get() : &context;
    step.observer = observed.get();
    const auto cache = transformer_.make_cache();
    KvCache* const caches[] = {cache.get()};
    for (int64_t layer = 0; layer < config().description.layers; ++layer) {
      cache->resize(0);
      SQZ_RETURN_IF_ERROR(transformer_.run_layer(layer, step, caches));
    }
    if (!options.losses) return std::vector<double>();
    return token_losses(transformer_, step.x, tokens.subspan(1), first);
  });
}

}  // namespace sqz::training
