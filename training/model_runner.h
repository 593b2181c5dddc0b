// The implementation of Runner (runner.h).
#pragma once

#include "training/runner.h"
#include "training/transformer.h"

namespace sqz::training {

class ModelRunner final : public Runner {
 public:
  explicit ModelRunner(Transformer transformer) : transformer_(std::move(transformer)) {}

  const ModelConfig& config() const override { return transformer_.config(); }
  Status prefill(std::span<const int32_t> tokens, const PrefillOptions& options) override;
  Result<Generation> generate(std::span<const int32_t> prompt, const GenerateOptions& options,
                              FixedContext* context, std::vector<float>* logits) override;
  Status generate_batch(std::span<const Question> questions, int64_t width, FixedContext& context,
                        const std::function<Status(int64_t, Generation)>& done) override;
  Result<std::vector<double>> score(std::span<const int32_t> tokens, FixedContext& context,
                                    const ScoreOptions& options) override;

 private:
  Transformer transformer_;
};

// Checks that the model has the positions first, first + 1, ... and the ids of these tokens.
Status check_tokens(const ModelDescription& model, std::span<const int32_t> tokens, int64_t first);
// kNumeric if a logit is NaN or infinite.
Status check_finite(const at::Tensor& logits, int64_t first_position);

// The default number of tokens that one thread takes through a layer at a time, so that their
// activations stay in a core's cache. Results depend on it, so it does not depend on the threads.
inline constexpr int64_t kDefaultChunk = 256;

// Runs `body`, and turns exceptions of LibTorch and the allocator into a Status.
template <class Body>
auto guarded(Body&& body) -> decltype(body()) {
  const c10::InferenceMode inference;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "not enough memory to run the model");
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    const bool memory = what.find("out of memory") != std::string::npos ||
                        what.find("allocate memory") != std::string::npos;
    return Status(memory ? Code::kOutOfMemory : Code::kInternal, concat("LibTorch: ", what));
  } catch (const std::exception& error) {
    return Status(Code::kInternal, concat("running the model: ", error.what()));
  }
}

}  // namespace sqz::training
