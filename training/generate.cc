#include <algorithm>
#include <cmath>

#include "formats/base/stopwatch.h"
#include "training/model_runner.h"
#include "training/sampler.h"

namespace sqz::training {
namespace {

Status check_options(const GenerateOptions& options) {
  if (options.max_tokens < 0) {
    return {Code::kInvalidArgument,
            concat("max_tokens ", options.max_tokens, ": expected 0 or more")};
  }
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    return {Code::kInvalidArgument,
            concat("temperature ", options.temperature, ": expected a finite number, 0 or more")};
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return {Code::kInvalidArgument,
            concat("top_p ", options.top_p, ": expected more than 0 and at most 1")};
  }
  return {};
}

// The caches of all layers and the position that comes next.
class TokenLoop {
 public:
  TokenLoop(const Transformer& transformer, FixedContext* context)
      : transformer_(transformer),
        context_(context),
        position_(context == nullptr ? 0 : context->tokens()) {
    const int64_t layers = transformer.config().description.layers;
    for (int64_t l = 0; l < layers; ++l) caches_.push_back(transformer.make_cache());
  }

  int64_t position() const { return position_; }

  // Runs `tokens` through the model and returns the state after the last layer, [T, hidden].
  Result<at::Tensor> run(std::span<const int32_t> tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    Step step;
    step.x = transformer_.embed(tokens);
    step.rope = transformer_.rope(position_, count);
    step.block = kDefaultChunk;
    step.context = context_;
    step.position = position_;
    for (size_t l = 0; l < caches_.size(); ++l) {
      SQZ_RETURN_IF_ERROR(transformer_.run_layer(static_cast<int64_t>(l), step, *caches_[l]));
    }
    position_ += count;
    return step.x;
  }

 private:
  const Transformer& transformer_;
  FixedContext* context_;
  int64_t position_;
  std::vector<std::unique_ptr<KvCache>> caches_;
};

}  // namespace

Result<Generation> ModelRunner::generate(std::span<const int32_t> prompt,
                                         const GenerateOptions& options, FixedContext* context,
                                         std::vector<float>* logits) {
  return guarded([&]() -> Result<Generation> {
    const ModelDescription& model = config().description;
    SQZ_RETURN_IF_ERROR(check_options(options));
    SQZ_RETURN_IF_ERROR(check_tokens(model, prompt, context == nullptr ? 0 : context->tokens()));
    std::vector<int32_t> stops = options.stop;
    stops.insert(stops.end(), config().eos_tokens.begin(), config().eos_tokens.end());

    Generation out;
    out.stop_reason = "length";
    TokenLoop loop(transformer_, context);
    Sampler sampler(options.temperature, options.top_p, options.seed);
    if (logits != nullptr) logits->clear();

    Stopwatch watch;
    SQZ_ASSIGN_OR_RETURN(at::Tensor x, loop.run(prompt));
    for (bool first = true;; first = false) {
      const at::Tensor rows = logits == nullptr ? x.narrow(0, x.size(0) - 1, 1) : x;
      const at::Tensor scores = transformer_.logits(rows).contiguous();
      SQZ_RETURN_IF_ERROR(check_finite(scores, loop.position() - scores.size(0)));
      const std::span<const float> all(scores.data_ptr<float>(),
                                       static_cast<size_t>(scores.numel()));
      if (logits != nullptr) logits->insert(logits->end(), all.begin(), all.end());
      if (first) {
        out.prefill_seconds = watch.seconds();
        watch = {};
      }
      if (static_cast<int64_t>(out.tokens.size()) >= options.max_tokens) break;
      const int32_t token = sampler.next(all.last(static_cast<size_t>(model.vocab_size)));
      if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
        out.stop_reason = "stop";
        break;
      }
      out.tokens.push_back(token);
      if (options.on_token && !options.on_token(token)) {
        out.stop_reason = "callback";
        break;
      }
      const bool last = static_cast<int64_t>(out.tokens.size()) == options.max_tokens;
      if (last || loop.position() == model.max_positions) break;
      SQZ_ASSIGN_OR_RETURN(x, loop.run(std::span(&out.tokens.back(), 1)));
    }
    out.decode_seconds = watch.seconds();
    return out;
  });
}

}  // namespace sqz::training
