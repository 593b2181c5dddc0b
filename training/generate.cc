#include <algorithm>
#include <utility>

#include "formats/base/stopwatch.h"
#include "training/model_runner.h"

namespace sqz::training {
namespace {

// One question while it is answered.
class Answering {
 public:
  Answering(const Transformer& transformer, const Question& question, int64_t index,
            int64_t context_tokens)
      : options_(question.options),
        index_(index),
        stops_(question.options.stop),
        next_(question.prompt) {
    const ModelConfig& config = transformer.config();
    stops_.insert(stops_.end(), config.eos_tokens.begin(), config.eos_tokens.end());
    const int64_t room =
        config.description.max_positions - context_tokens - std::ssize(question.prompt);
    most_ = std::min(options_.max_tokens, room + 1);
    out_.stop_reason = "length";
    for (int64_t l = 0; l < config.description.layers; ++l)
      caches_.push_back(transformer.make_cache());
  }

  int64_t index() const { return index_; }
  KvCache& cache(int64_t layer) const { return *caches_[static_cast<size_t>(layer)]; }
  // The tokens that the next step runs: the prompt, then the last token.
  const std::vector<int32_t>& next() const { return next_; }

  // Chooses a token by the logits of the last one. False: the answer has ended.
  bool take(std::span<const float> logits) {
    if (std::exchange(first_, false)) {
      out_.prefill_seconds = watch_.seconds();
      watch_ = {};
    }
    if (most_ <= 0) return false;
    const auto best = std::max_element(logits.begin(), logits.end());
    const auto token = static_cast<int32_t>(best - logits.begin());
    if (std::find(stops_.begin(), stops_.end(), token) != stops_.end()) {
      out_.stop_reason = "stop";
      return false;
    }
    out_.tokens.push_back(token);
    next_ = {token};
    if (options_.on_token && !options_.on_token(token)) {
      out_.stop_reason = "callback";
      return false;
    }
    return std::ssize(out_.tokens) < most_;
  }

  Generation finish() {
    out_.decode_seconds = watch_.seconds();
    return std::move(out_);
  }

 private:
  const GenerateOptions& options_;
  int64_t index_, most_ = 0;
  std::vector<int32_t> stops_, next_;
  std::vector<std::unique_ptr<KvCache>> caches_;  // [layers]
  Generation out_;
  Stopwatch watch_;
  bool first_ = true;
};

using Group = std::vector<Answering*>;

// Runs the next tokens of a group through all layers. Returns the logits of all tokens, or of the
// last token of each.
Result<at::Tensor> run_step(const Transformer& transformer, const Group& group,
                            FixedContext* context, bool all_rows) {
  const int64_t fixed = context == nullptr ? 0 : context->tokens();
  Step step;
  step.block = kDefaultChunk;
  step.context = context;
  step.indptr = {0};
  std::vector<int32_t> tokens;
  std::vector<at::Tensor> cosines, sines;
  const at::Tensor rows = at::empty({std::ssize(group)}, at::kLong);
  for (size_t r = 0; r < group.size(); ++r) {
    const std::vector<int32_t>& next = group[r]->next();
    const RopeTable rope = transformer.rope(fixed + group[r]->cache(0).size(), std::ssize(next));
    cosines.push_back(rope.cos);
    sines.push_back(rope.sin);
    tokens.insert(tokens.end(), next.begin(), next.end());
    step.indptr.push_back(std::ssize(tokens));
    rows.data_ptr<int64_t>()[r] = std::ssize(tokens) - 1;
  }
  step.x = transformer.embed(tokens);
  step.rope = {at::cat(cosines), at::cat(sines)};
  std::vector<KvCache*> caches(group.size());
  for (int64_t l = 0; l < transformer.config().description.layers; ++l) {
    for (size_t r = 0; r < group.size(); ++r) caches[r] = &group[r]->cache(l);
    SQZ_RETURN_IF_ERROR(transformer.run_layer(l, step, caches));
  }
  if (!all_rows) step.x = step.x.index_select(0, rows.to(step.x.device()));
  const at::Tensor logits = transformer.logits(step.x).contiguous();
  SQZ_RETURN_IF_ERROR(check_finite(logits, 0));
  return logits;
}

// Questions that share steps. New ones run their prompts in a step of their own.
class Batch {
 public:
  Batch(const Transformer& transformer, FixedContext* context,
        const std::function<Status(int64_t, Generation)>& done, std::vector<float>* logits)
      : transformer_(transformer), context_(context), done_(done), logits_(logits) {}

  Status run(std::span<const Question> questions, int64_t width) {
    const int64_t first = context_ == nullptr ? 0 : context_->tokens();
    size_t asked = 0;
    while (asked < questions.size() || !running_.empty()) {
      Group joined;
      int64_t tokens = 0;
      for (; asked < questions.size() && std::ssize(running_) < width; ++asked) {
        const Question& question = questions[asked];
        SQZ_RETURN_IF_ERROR(
            check_tokens(transformer_.config().description, question.prompt, first));
        tokens += std::ssize(question.prompt);
        if (!joined.empty() && tokens > kMaxContextTokens) break;
        running_.push_back(std::make_unique<Answering>(transformer_, question,
                                                       static_cast<int64_t>(asked), first));
        joined.push_back(running_.back().get());
      }
      if (joined.empty()) {
        for (const auto& answering : running_) joined.push_back(answering.get());
      }
      SQZ_RETURN_IF_ERROR(advance(joined));
    }
    return {};
  }

 private:
  Status advance(const Group& group) {
    SQZ_ASSIGN_OR_RETURN(const at::Tensor logits,
                         run_step(transformer_, group, context_, logits_ != nullptr));
    const auto vocab = static_cast<size_t>(logits.size(1));
    const std::span all(logits.data_ptr<float>(), static_cast<size_t>(logits.numel()));
    if (logits_ != nullptr) logits_->insert(logits_->end(), all.begin(), all.end());
    size_t row = static_cast<size_t>(logits.size(0)) - group.size();
    for (Answering* answering : group) {
      if (answering->take(all.subspan(vocab * row++, vocab))) continue;
      SQZ_RETURN_IF_ERROR(done_(answering->index(), answering->finish()));
      std::erase_if(running_, [&](const auto& one) { return one.get() == answering; });
    }
    return {};
  }

  const Transformer& transformer_;
  FixedContext* context_;
  const std::function<Status(int64_t, Generation)>& done_;
  std::vector<float>* logits_;  // of every token; then there is one question
  std::vector<std::unique_ptr<Answering>> running_;
};

}  // namespace

Status ModelRunner::generate_batch(std::span<const Question> questions, int64_t width,
                                   FixedContext& context,
                                   const std::function<Status(int64_t, Generation)>& done) {
  return guarded(
      [&] { return Batch(transformer_, &context, done, nullptr).run(questions, width); });
}

Result<Generation> ModelRunner::generate(std::span<const int32_t> prompt,
                                         const GenerateOptions& options, FixedContext* context,
                                         std::vector<float>* logits) {
  return guarded([&]() -> Result<Generation> {
    if (logits != nullptr) logits->clear();
    const Question question{{prompt.begin(), prompt.end()}, options};
    Generation out;
    const std::function<Status(int64_t, Generation)> done = [&](int64_t, Generation answer) {
      out = std::move(answer);
      return Status();
    };
    SQZ_RETURN_IF_ERROR(Batch(transformer_, context, done, logits).run({&question, 1}, 1));
    return out;
  });
}

}  // namespace sqz::training
