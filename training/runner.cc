#include "training/runner.h"

#include <ATen/Context.h>

#include "training/model_runner.h"

namespace sqz {
namespace {

// "cpu", "cuda" or "cuda:N", which the tools check.
Result<at::Device> device_of(const std::string& name) {
  if (name == "cpu" || at::hasCUDA()) return at::Device(name);
  return Status(Code::kInvalidArgument,
                concat("device \"", name, "\": no CUDA device, or a LibTorch without CUDA"));
}

}  // namespace

Result<std::unique_ptr<Runner>> Runner::load(const std::string& directory,
                                             const RunnerOptions& options) {
  return training::guarded([&]() -> Result<std::unique_ptr<Runner>> {
    SQZ_ASSIGN_OR_RETURN(const at::Device device, device_of(options.device));
    SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(directory));
    training::set_threads(options.threads);
    const auto dtype = options.dtype == DType::kF32 ? at::kFloat : at::kBFloat16;
    std::unique_ptr<Runner> runner = std::make_unique<training::ModelRunner>(training::Transformer(
        checkpoint->config(), training::load_weights(*checkpoint, device, dtype)));
    return runner;
  });
}

namespace training {

Status check_tokens(const ModelDescription& model, std::span<const int32_t> tokens, int64_t first) {
  if (tokens.empty()) return {Code::kInvalidArgument, "no tokens to run the model on"};
  const auto count = static_cast<int64_t>(tokens.size());
  if (count > model.max_positions - first) {
    return {Code::kInvalidArgument,
            concat(first + count, " tokens: the model has ", model.max_positions, " positions")};
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < model.vocab_size) continue;
    return {Code::kInvalidArgument, concat("token ", i, ": found id ", tokens[i],
                                           ", expected 0 to ", model.vocab_size - 1)};
  }
  return {};
}

Status check_finite(const at::Tensor& logits, int64_t first_position) {
  const at::Tensor good = logits.isfinite().all(1);
  if (good.all().item<bool>()) return {};
  const int64_t row = good.logical_not().nonzero()[0].item<int64_t>();
  return {Code::kNumeric, concat("NaN or infinity in the logits, row ", first_position + row)};
}

}  // namespace training
}  // namespace sqz
