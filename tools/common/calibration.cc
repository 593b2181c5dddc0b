#include "tools/common/calibration.h"

#include "tools/common/index_context.h"

namespace sqz {
namespace {

constexpr double kRecordShare = 0.8;  // of the time, roughly

// Passes every call on and keeps its queries.
class Recorder final : public FixedContext {
 public:
  Recorder(FixedContext& inner, const IndexMetadata& index, int64_t position)
      : inner_(inner), index_(index), tokens_(position > 0 ? position : inner.tokens()) {
    recorded_.layers.resize(static_cast<size_t>(index.model.layers));
  }

  int64_t tokens() const override { return tokens_; }

  Status attend(int64_t layer, const ContextQueries& queries) override {
    const auto l = static_cast<size_t>(layer);
    const int64_t count = queries.indptr.back();
    if (layer == 0) recorded_.calls.push_back(count);
    if (!index_.layers[l].dense) {
      const auto* q = static_cast<const float*>(queries.q);  // the inner context is on the CPU
      recorded_.layers[l].insert(recorded_.layers[l].end(), q,
                                 q + count * queries.heads * queries.dim);
    }
    return inner_.attend(layer, queries);
  }

  RecordedQueries take() { return std::move(recorded_); }

 private:
  FixedContext& inner_;
  const IndexMetadata& index_;
  int64_t tokens_;
  RecordedQueries recorded_;
};

}  // namespace

Result<uint64_t> calibrate_with_prompts(Runner& runner, const SqzFile& index,
                                        const CalibrationPrompts& prompts,
                                        const std::string& output,
                                        const RecalibrateOptions& options,
                                        const std::function<void(double)>& progress) {
  SQZ_RETURN_IF_ERROR(
      check_same_model(index.metadata().model, runner.config().description, index.path()));
  auto dense = runtime::dense_options();
  dense.max_tokens = kMaxContextTokens;
  dense.threads = options.threads;
  SQZ_ASSIGN_OR_RETURN(const auto context, IndexContext::open(index.path(), dense));
  Recorder recorder(*context, index.metadata(), prompts.position);
  GenerateOptions generate;
  generate.max_tokens = prompts.answer_tokens;
  const size_t count = prompts.prompts.size();
  size_t prompt_tokens = 0, answer_tokens = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto answer = runner.generate(prompts.prompts[i], generate, &recorder);
    if (!answer.ok()) {
      return Status(answer.status().code(),
                    concat("calibration prompt ", i + 1, ": ", answer.status().message()));
    }
    prompt_tokens += prompts.prompts[i].size();
    answer_tokens += answer->tokens.size();
    progress(kRecordShare * static_cast<double>(i + 1) / static_cast<double>(count));
  }
  RecordedQueries queries = recorder.take();
  queries.source = concat("prompts: ", count, " prompts, ", prompt_tokens, " tokens, and ",
                          answer_tokens, " tokens of answers");
  return recalibrate(Env::posix(), index, queries, output, options,
                     [&](double done) { progress(kRecordShare + (1 - kRecordShare) * done); });
}

}  // namespace sqz
