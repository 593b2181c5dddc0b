// The model under evaluation, its tokenizer, and a context that stands where a trial needs it.
#pragma once

#include <memory>
#include <string>

#include "formats/tokenizer.h"
#include "tools/common/index_context.h"
#include "training/runner.h"

namespace sqz::eval {

struct EvalModel {
  std::unique_ptr<Runner> runner;
  std::unique_ptr<Tokenizer> tokenizer;

  const ModelDescription& description() const { return runner->config().description; }
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
  Status attend_requests(int64_t layer, const ContextQueries& queries) override {
    return inner_.attend_requests(layer, queries);
  }
  std::optional<int> device() const override { return inner_.device(); }
  DType device_dtype() const override { return inner_.device_dtype(); }

 private:
  FixedContext& inner_;
  int64_t tokens_;
};

}  // namespace sqz::eval
