// Answers that are drafted over one context and checked over another (speculative decoding).
#include <algorithm>
#include <cmath>

#include "training/answering.h"

namespace sqz::training {
namespace {

constexpr int64_t kMostDrafts = 16;
constexpr int64_t kFirstDrafts = 4;
constexpr int64_t kMostGuesses = 8;

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

// What followed where the longest end of the text stood before (prompt lookup decoding): as many
// tokens as that end has, at most `most`. Of equals the last place; none if the last token is new.
std::vector<int32_t> look_up(std::span<const int32_t> text, int64_t most) {
  int64_t longest = 0, place = 0;
  const int64_t size = std::ssize(text);
  for (int64_t end = size - 1; end > 0 && longest < most; --end) {
    int64_t same = 0;
    while (same < std::min(end, most) && text[end - 1 - same] == text[size - 1 - same]) ++same;
    if (same <= longest) continue;
    longest = same;
    place = end;
  }
  const auto from = text.subspan(place, std::min(longest, size - place));
  return {from.begin(), from.end()};
}

Result<StepResult> run_step(StepEngine& engine, int64_t at, std::vector<int32_t> tokens,
                            const StepOptions& options) {
  const StepPart part{0, at, std::move(tokens)};
  SQZ_RETURN_IF_ERROR(engine.start({&part, 1}, options));
  return engine.finish();
}

// Drafts over one context.
class Drafter {
 public:
  Drafter(StepEngine& engine, FixedContext& context, bool logits)
      : engine_(engine), context_(context), logits_(logits) {}

  int64_t steps() const { return steps_; }

  // `wanted` tokens behind `text`, whose last token is number `at` of the slot and was not run.
  // Guesses from the text itself are drafts of the drafts: a step runs them all, and they end where
  // it chooses another token. Fewer, if a choice is not finite.
  Result<std::vector<int32_t>> draft(std::vector<int32_t> text, int64_t at, int64_t wanted,
                                     Sampler sampler) {
    const size_t begin = text.size();
    const auto left = [&] { return wanted - std::ssize(text) + static_cast<int64_t>(begin); };
    while (left() > 0) {
      const auto guesses = look_up(text, std::min(kMostGuesses, left() - 1));
      std::vector<int32_t> tokens = {text.back()};
      tokens.insert(tokens.end(), guesses.begin(), guesses.end());
      const int64_t run = at + std::ssize(text) - static_cast<int64_t>(begin);
      SQZ_ASSIGN_OR_RETURN(const StepResult next, run_step(engine_, run, std::move(tokens),
                                                           {&context_, !guesses.empty(), logits_}));
      ++steps_;
      for (size_t row = 0; row < next.choices.size(); ++row) {
        if (next.choices[row] < 0) return std::vector(text.begin() + begin, text.end());
        text.push_back(pick(next, row, sampler));
        if (row < guesses.size() && text.back() != guesses[row]) break;
      }
    }
    return std::vector(text.begin() + begin, text.end());
  }

 private:
  int32_t pick(const StepResult& step, size_t row, Sampler& sampler) const {
    if (!logits_) return step.choices[row];
    const auto vocab = static_cast<size_t>(step.logits.size(1));
    return sampler.next({step.logits.data_ptr<float>() + row * vocab, vocab});
  }

  StepEngine& engine_;
  FixedContext& context_;
  bool logits_;
  int64_t steps_ = 0;
};

}  // namespace

Result<Generation> generate_checked(const ModelConfig& config, StepEngine& engine,
                                    const BatchQuestion& question, FixedContext& context) {
  FixedContext& check = *question.options.check;
  SQZ_RETURN_IF_ERROR(check_generate(config, question.prompt, question.options, context.tokens()));
  auto at = static_cast<int64_t>(question.prompt.size());  // own tokens that were run and are right
  Answering answering(config, question.options, context.tokens() + at);
  SQZ_RETURN_IF_ERROR(engine.reserve(at + answering.most()));
  const bool logits = !answering.greedy();
  const StepOptions whole{&check, true, logits};
  Drafter drafter(engine, context, logits);

  SQZ_ASSIGN_OR_RETURN(StepResult result,
                       run_step(engine, 0, question.prompt, {&check, false, logits}));
  SQZ_ASSIGN_OR_RETURN(bool more, answering.take(result, 0));
  DraftLength length;
  int64_t drafted = 0, accepted = 0, checks = 0;
  while (more) {
    const int64_t left = answering.most() - std::ssize(answering.tokens());
    const int64_t wanted = std::min(length.best(), left - 1);
    std::vector<int32_t> text = question.prompt;
    text.insert(text.end(), answering.tokens().begin(), answering.tokens().end());
    Stopwatch watch;
    // Drawn with the numbers that the check will draw.
    SQZ_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                         drafter.draft(std::move(text), at, wanted, answering.sampler()));
    tokens.insert(tokens.begin(), answering.last());
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
  out.draft_steps = drafter.steps();
  return out;
}

}  // namespace sqz::training
