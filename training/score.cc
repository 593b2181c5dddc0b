#include <algorithm>

#include "training/model_runner.h"

namespace sqz::training {
namespace {

constexpr int64_t kLogitRows = 64;  // of the vocabulary's width, in memory at once

// The context, and beside it the tokens' attention to each other, for an observer.
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

  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override {
    SQZ_RETURN_IF_ERROR(inner_.attend(layer, first, count, q, out, lse));
    const at::Tensor queries = at::from_blob(
        const_cast<float*>(q), {count, model_.query_heads, model_.head_dim}, at::kFloat);
    const at::Tensor keys = own_->keys();  // where and of what type the cache computes, if not here
    const AttentionState own =
        own_->attend(keys.defined() ? queries.to(keys.options()) : queries, first - inner_.tokens(),
                     model_.sliding_window[static_cast<size_t>(layer)]);
    const at::Tensor own_out = own.out.cpu(), own_lse = own.lse.cpu();
    return options_.observer({.layer = layer,
                              .first = first,
                              .count = count,
                              .queries = q,
                              .context_out = out,
                              .context_lse = lse,
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
