// Answers that are drafted over one context and checked over another (speculative decoding).
#include <algorithm>
#include <cmath>

#include "training/answering.h"

namespace sqz::training {
namespace {

constexpr int64_t kMostDrafts = 16;
constexpr int64_t kFirstDrafts = 4;

// How many tokens to draft: what gives most tokens a second at the share that was accepted and the
// times that drafts and checks took.
class DraftLength {
 public:
  int64_t best() const {
    if (checks_ < 2) return kFirstDrafts;
    const double share = (accepted_ + 1) / (judged_ + 2);  // judged by Laplace's rule
    const double draft = draft_seconds_ / drafted_, check = check_seconds_ / checks_;
    int64_t best = 0;
    double highest = 0;
    for (int64_t k = 0; k <= kMostDrafts; ++k) {
      const double tokens = (1 - std::pow(share, k + 1)) / (1 - share);
      const double rate = tokens / (static_cast<double>(k) * draft + check);
      if (rate <= highest) continue;
      highest = rate;
      best = k;
    }
    return std::max<int64_t>(best, 1);  // a text may become easier
  }

  void add(int64_t drafted, int64_t accepted, double draft_seconds, double check_seconds) {
    constexpr double kKept = 0.9;  // of what was before
    for (double* sum :
         {&judged_, &accepted_, &drafted_, &draft_seconds_, &check_seconds_, &checks_}) {
      *sum *= kKept;
    }
    judged_ += static_cast<double>(std::min(drafted, accepted + 1));
    accepted_ += static_cast<double>(accepted);
    drafted_ += static_cast<double>(drafted);
    draft_seconds_ += draft_seconds;
    check_seconds_ += check_seconds;
    ++checks_;
  }

 private:
  double judged_ = 0, accepted_ = 0, drafted_ = 0, draft_seconds_ = 0, check_seconds_ = 0;
  double checks_ = 0;
};

Result<StepResult> run_step(StepEngine& engine, int64_t at, std::vector<int32_t> tokens,
                            const StepOptions& options) {
  const StepPart part{0, at, std::move(tokens)};
  SQZ_RETURN_IF_ERROR(engine.start({&part, 1}, options));
  return engine.finish();
}

}  // namespace

Result<Generation> generate_checked(const ModelConfig& config, StepEngine& engine,
                                    const BatchQuestion& question, FixedContext& context) {
  FixedContext& check = *question.options.check;
  SQZ_RETURN_IF_ERROR(check_generate(config, question.prompt, question.options, context.tokens()));
  auto at = static_cast<int64_t>(question.prompt.size());  // own tokens that were run and are right
  Answering answering(config, question.options, context.tokens() + at);
  SQZ_RETURN_IF_ERROR(engine.reserve(at + answering.most()));
  const bool logits = !answering.greedy();
  const StepOptions draft{&context, false, logits}, whole{&check, true, logits};

  SQZ_ASSIGN_OR_RETURN(StepResult result,
                       run_step(engine, 0, question.prompt, {&check, false, logits}));
  SQZ_ASSIGN_OR_RETURN(bool more, answering.take(result, 0));
  DraftLength length;
  int64_t drafted = 0, accepted = 0, checks = 0;
  while (more) {
    const int64_t left = answering.most() - std::ssize(answering.tokens());
    const int64_t wanted = std::min(length.best(), left - 1);
    std::vector<int32_t> tokens = {answering.last()};
    Sampler sampler = answering.sampler();  // the numbers that the check will draw
    Stopwatch watch;
    while (std::ssize(tokens) <= wanted) {
      SQZ_ASSIGN_OR_RETURN(const StepResult next,
                           run_step(engine, at + std::ssize(tokens) - 1, {tokens.back()}, draft));
      if (next.choices[0] < 0) break;
      const auto vocab = static_cast<size_t>(logits ? next.logits.size(1) : 0);
      tokens.push_back(logits ? sampler.next({next.logits.data_ptr<float>(), vocab})
                              : next.choices[0]);
    }
    const double draft_seconds = watch.seconds();
    watch = {};
    SQZ_ASSIGN_OR_RETURN(result, run_step(engine, at, tokens, whole));
    size_t row = 0;
    for (;; ++row) {
      SQZ_ASSIGN_OR_RETURN(more, answering.take(result, row));
      if (!more || row + 1 == tokens.size() || answering.last() != tokens[row + 1]) break;
    }
    at += static_cast<int64_t>(row) + 1;
    length.add(std::ssize(tokens) - 1, static_cast<int64_t>(row), draft_seconds, watch.seconds());
    drafted += std::ssize(tokens) - 1;
    accepted += static_cast<int64_t>(row);
    ++checks;
  }
  Generation out = answering.finish();
  out.drafted = drafted;
  out.accepted = accepted;
  out.checks = checks;
  return out;
}

}  // namespace sqz::training
