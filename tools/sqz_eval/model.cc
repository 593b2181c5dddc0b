#include "tools/sqz_eval/model.h"

#include "tools/sqz_eval/metrics.h"

namespace sqz::eval {
namespace {

constexpr int64_t kLogitRows = 64;  // of the vocabulary's width, in memory at once

std::vector<double> token_losses(const training::Transformer& transformer, const at::Tensor& x,
                                 std::span<const int32_t> targets) {
  std::vector<double> out;
  const auto vocabulary = static_cast<size_t>(transformer.config().description.vocab_size);
  for (int64_t row = 0; row < x.size(0); row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, x.size(0) - row);
    const at::Tensor logits = transformer.logits(x.narrow(0, row, rows)).contiguous();
    const std::span<const float> all(logits.data_ptr<float>(), static_cast<size_t>(logits.numel()));
    for (int64_t i = 0; i < rows; ++i) {
      out.push_back(token_loss(all.subspan(static_cast<size_t>(i) * vocabulary, vocabulary),
                               targets[static_cast<size_t>(row + i)]));
    }
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<EvalModel>> EvalModel::load(const std::string& directory,
                                                   const RunnerOptions& options) {
  SQZ_ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::load(directory));
  return training::guarded([&]() -> Result<std::unique_ptr<EvalModel>> {
    SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(directory));
    training::set_threads(options.threads);
    const auto dtype = options.dtype == DType::kF32 ? at::kFloat : at::kBFloat16;
    SQZ_ASSIGN_OR_RETURN(auto weights, training::load_weights(*checkpoint, at::kCPU, dtype));
    return std::unique_ptr<EvalModel>(new EvalModel(
        training::Transformer(checkpoint->config(), std::move(weights)), std::move(tokenizer)));
  });
}

Result<std::vector<double>> EvalModel::run(std::span<const int32_t> tokens, int64_t first,
                                           FixedContext& context, training::LayerObserver* observer,
                                           bool losses) const {
  return training::guarded([&]() -> Result<std::vector<double>> {
    const auto inputs = losses ? tokens.first(tokens.size() - 1) : tokens;
    SQZ_RETURN_IF_ERROR(training::check_tokens(description(), inputs, first));
    training::Step step;
    step.x = transformer_.embed(inputs);
    step.rope = transformer_.rope(first, static_cast<int64_t>(inputs.size()));
    step.block = training::kDefaultChunk;
    step.context = &context;
    step.position = first;
    step.observer = observer;
    const auto cache = transformer_.make_cache();
    for (int64_t layer = 0; layer < description().layers; ++layer) {
      cache->resize(0);
      SQZ_RETURN_IF_ERROR(transformer_.run_layer(layer, step, *cache));
    }
    if (!losses) return std::vector<double>();
    return token_losses(transformer_, step.x, tokens.subspan(1));
  });
}

}  // namespace sqz::eval
