#include <algorithm>

#include "training/model_runner.h"
#include "training/step_engine.h"

namespace sqz::training {
namespace {

class LayerEngine final : public StepEngine {
 public:
  LayerEngine(const Transformer& transformer, int64_t slots)
      : transformer_(transformer), caches_(static_cast<size_t>(slots)) {
    for (auto& slot : caches_) {
      for (int64_t l = 0; l < transformer.config().description.layers; ++l) {
        slot.push_back(transformer.make_cache());
      }
    }
  }

  int64_t slots() const override { return std::ssize(caches_); }
  Status reserve(int64_t) override { return {}; }  // caches grow
  bool runs_ahead() const override { return false; }

  Status start(std::span<const StepPart> parts, const StepOptions& options) override {
    const int64_t fixed = options.context == nullptr ? 0 : options.context->tokens();
    Step step;
    step.block = kDefaultChunk;
    step.context = options.context;
    step.indptr = {0};
    std::vector<int32_t> tokens;
    std::vector<at::Tensor> cosines, sines;
    std::vector<int64_t> rows;
    for (const StepPart& part : parts) {
      const auto count = static_cast<int64_t>(part.tokens.size());
      const RopeTable rope = transformer_.rope(fixed + part.at, count);
      cosines.push_back(rope.cos);
      sines.push_back(rope.sin);
      tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
      step.indptr.push_back(std::ssize(tokens));
      rows.push_back(std::ssize(tokens) - 1);
    }
    step.x = transformer_.embed(tokens);
    step.rope = {at::cat(cosines), at::cat(sines)};
    std::vector<KvCache*> caches(parts.size());
    for (size_t l = 0; l < caches_.front().size(); ++l) {
      for (size_t r = 0; r < parts.size(); ++r) {
        caches[r] = caches_[static_cast<size_t>(parts[r].slot)][l].get();
        caches[r]->resize(parts[r].at);
      }
      SQZ_RETURN_IF_ERROR(transformer_.run_layer(static_cast<int64_t>(l), step, caches));
    }
    if (!options.all_rows && std::ssize(rows) < step.x.size(0)) {
      const at::Tensor picked = at::empty({std::ssize(rows)}, at::kLong);
      std::copy(rows.begin(), rows.end(), picked.data_ptr<int64_t>());
      step.x = step.x.index_select(0, picked.to(step.x.device()));
    }
    result_.logits = transformer_.logits(step.x).contiguous();
    result_.choices.clear();
    const int64_t vocab = result_.logits.size(1);
    const at::Tensor finite = result_.logits.isfinite().all(1);
    for (int64_t row = 0; row < result_.logits.size(0); ++row) {
      const float* logits = result_.logits.data_ptr<float>() + row * vocab;
      const auto best = std::max_element(logits, logits + vocab) - logits;
      result_.choices.push_back(finite.data_ptr<bool>()[row] ? static_cast<int32_t>(best) : -1);
    }
    return {};
  }

  Result<StepResult> finish() override { return std::move(result_); }

 private:
  const Transformer& transformer_;
  std::vector<std::vector<std::unique_ptr<KvCache>>> caches_;  // [slots][layers]
  StepResult result_;
};

}  // namespace

std::unique_ptr<StepEngine> make_layer_engine(const Transformer& transformer, int64_t slots) {
  return std::make_unique<LayerEngine>(transformer, slots);
}

}  // namespace sqz::training
