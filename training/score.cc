#include <algorithm>

#include "training/model_runner.h"

namespace sqz::training {
namespace {

constexpr int64_t kLogitRows = 64;  // of the vocabulary's width, in memory at once

at::Tensor on_host(const at::Tensor& x) {
  return x.to(at::kCPU, at::kFloat).contiguous();
}

// Shows the observer both states of the tokens' attention, as many tokens at a time as the context
// was asked about at a time. `start`: position of the first token.
Status show_states(const ScoreOptions& options, int64_t layer, int64_t start, int64_t window,
                   const at::Tensor& q, const AttentionState& context, const KvCache& own) {
  for (int64_t first = 0; first < q.size(0); first += kMaxContextTokens) {
    const int64_t count = std::min(kMaxContextTokens, q.size(0) - first);
    const auto part = [&](const at::Tensor& x) { return on_host(x.narrow(0, first, count)); };
    const AttentionState since = own.attend(q.narrow(0, first, count), first, window);
    const at::Tensor queries = part(q), out = part(context.out), lse = part(context.lse);
    const at::Tensor own_out = on_host(since.out), own_lse = on_host(since.lse);
    SQZ_RETURN_IF_ERROR(options.observer({.layer = layer,
                                          .first = start + first,
                                          .count = count,
                                          .heads = q.size(1),
                                          .dim = q.size(2),
                                          .queries = queries.data_ptr<float>(),
                                          .context_out = out.data_ptr<float>(),
                                          .context_lse = lse.data_ptr<float>(),
                                          .own_out = own_out.data_ptr<float>(),
                                          .own_lse = own_lse.data_ptr<float>()}));
  }
  return {};
}

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
    Step step;
    step.x = transformer_.embed(inputs);
    step.rope = transformer_.rope(first, count);
    step.block = kDefaultChunk;
    step.context = &context;
    if (options.observer) {
      step.answered = [&](int64_t layer, const at::Tensor& q, const AttentionState& state,
                          const KvCache& own) {
        const int64_t window = config().description.sliding_window[static_cast<size_t>(layer)];
        return show_states(options, layer, first, window, q, state, own);
      };
    }
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
