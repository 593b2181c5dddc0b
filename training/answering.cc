#include "training/answering.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "training/model_runner.h"

namespace sqz::training {

Status check_generate(const ModelConfig& config, std::span<const int32_t> prompt,
                      const GenerateOptions& options, int64_t first) {
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
  return check_tokens(config.description, prompt, first);
}

Answering::Answering(const ModelConfig& config, const GenerateOptions& options, int64_t position)
    : options_(options),
      stops_(options.stop),
      position_(position),
      most_(std::min(options.max_tokens, config.description.max_positions - position + 1)),
      sampler_(options.temperature, options.top_p, options.seed) {
  stops_.insert(stops_.end(), config.eos_tokens.begin(), config.eos_tokens.end());
  out_.stop_reason = "length";
}

Result<bool> Answering::take(const StepResult& step, size_t row) {
  if (step.choices[row] < 0) {
    return Status(Code::kNumeric, concat("NaN or infinity in the logits, row ",
                                         position_ + std::ssize(out_.tokens) - 1));
  }
  if (std::exchange(first_, false)) {
    out_.prefill_seconds = watch_.seconds();
    watch_ = {};
  }
  if (std::ssize(out_.tokens) >= most_) return false;
  int32_t token = step.choices[row];
  if (!greedy()) {
    const auto vocab = static_cast<size_t>(step.logits.size(1));
    token = sampler_.next({step.logits.data_ptr<float>() + row * vocab, vocab});
  }
  if (std::find(stops_.begin(), stops_.end(), token) != stops_.end()) {
    out_.stop_reason = "stop";
    return false;
  }
  out_.tokens.push_back(token);
  if (options_.on_token && !options_.on_token(token)) {
    out_.stop_reason = "callback";
    return false;
  }
  return std::ssize(out_.tokens) < most_;
}

Generation Answering::finish() {
  out_.decode_seconds = first_ ? 0 : watch_.seconds();
  return std::move(out_);
}

}  // namespace sqz::training
