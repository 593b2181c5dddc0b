// The model under evaluation: one copy of the weights behind the runner (dense pass, answers) and
// behind runs that look inside (losses, attention outputs).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/tokenizer.h"
#include "tools/sqz_generate/index_context.h"
#include "training/model_runner.h"

namespace sqz::eval {

class EvalModel {
 public:
  static Result<std::unique_ptr<EvalModel>> load(const std::string& directory,
                                                 const RunnerOptions& options);

  const ModelDescription& description() const { return transformer_.config().description; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  Runner& runner() { return runner_; }
  const training::Transformer& transformer() const { return transformer_; }

  // Runs `tokens` at positions first, first + 1, ... behind `context`. `observer` may be null.
  // With `losses`, tokens[i + 1] is the target of tokens[i]: all but the last token are run, and
  // the losses of the others, in nats, are returned.
  Result<std::vector<double>> run(std::span<const int32_t> tokens, int64_t first,
                                  FixedContext& context, training::LayerObserver* observer,
                                  bool losses) const;

 private:
  EvalModel(training::Transformer transformer, std::unique_ptr<Tokenizer> tokenizer)
      : transformer_(transformer),
        runner_(std::move(transformer)),
        tokenizer_(std::move(tokenizer)) {}

  training::Transformer transformer_;  // shares its weights with runner_'s
  training::ModelRunner runner_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

// A context whose next token stands at `tokens`, whatever the length of the index behind it.
class PlacedContext final : public FixedContext {
 public:
  PlacedContext(FixedContext& inner, int64_t tokens) : inner_(inner), tokens_(tokens) {}

  int64_t tokens() const override { return tokens_; }
  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override {
    return inner_.attend(layer, first, count, q, out, lse);
  }

 private:
  FixedContext& inner_;
  int64_t tokens_;
};

}  // namespace sqz::eval
