#include "tools/common/calibration.h"

#include "tools/common/index_context.h"

namespace sqz {
namespace {

constexpr double kRecordShare = 0.8;  // of the time, roughly

// Passes every call on and keeps its queries.
class Recorder final : public FixedContext {
 public:
  Recorder(FixedContext& inner, const IndexMetadata& index, int64_t position)
      : inner_(inner),
        index_(index),
        tokens_(position > 0 ? position : inner.tokens()) {
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

std::string source_text(const CalibrationPrompts& prompts, int64_t answer_tokens) {
  size_t tokens = 0;
  for (const auto& prompt : prompts.prompts) tokens += prompt.size();
  return concat("prompts: ", prompts.prompts.size(), " prompts, ", tokens, " tokens, and ",
                answer_tokens, " tokens of answers");
}

}  // namespace

Status check_prompts_possible(const SqzFile& index) {
  return check_calibratable(index);
}

Result<RecordedQueries> record_queries(Runner& runner, const std::string& path,
                                       const CalibrationPrompts& prompts, int threads,
                                       const std::function<void(double)>& progress) {
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(path));
  SQZ_RETURN_IF_ERROR(check_prompts_possible(*index));
  SQZ_RETURN_IF_ERROR(check_same_model(index->metadata().model, runner.config().description, path));
  sqz_session_options dense = {};
  dense.struct_size = sizeof(dense);
  dense.selector = SQZ_SELECTOR_DENSE;
  dense.max_tokens = kMaxContextTokens;
  dense.threads = threads;
  SQZ_ASSIGN_OR_RETURN(const auto context, IndexContext::open(path, dense));
  Recorder recorder(*context, index->metadata(), prompts.position);
  GenerateOptions options;
  options.max_tokens = prompts.answer_tokens;
  const auto count = static_cast<double>(prompts.prompts.size());
  int64_t answer_tokens = 0;
  for (size_t i = 0; i < prompts.prompts.size(); ++i) {
    const auto answer = runner.generate(prompts.prompts[i], options, &recorder);
    if (!answer.ok()) {
      return Status(answer.status().code(),
                    concat("calibration prompt ", i + 1, ": ", answer.status().message()));
    }
    answer_tokens += static_cast<int64_t>(answer->tokens.size());
    progress(static_cast<double>(i + 1) / count);
  }
  RecordedQueries out = recorder.take();
  out.source = source_text(prompts, answer_tokens);
  return out;
}

Result<uint64_t> calibrate_with_prompts(Runner& runner, const std::string& path,
                                        const CalibrationPrompts& prompts,
                                        const std::string& output,
                                        const RecalibrateOptions& options,
                                        const std::function<void(double)>& progress) {
  SQZ_ASSIGN_OR_RETURN(const RecordedQueries queries,
                       record_queries(runner, path, prompts, options.threads,
                                      [&](double done) { progress(kRecordShare * done); }));
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(path));
  return recalibrate(Env::posix(), *index, queries, output, options,
                     [&](double done) { progress(kRecordShare + (1 - kRecordShare) * done); });
}

}  // namespace sqz
