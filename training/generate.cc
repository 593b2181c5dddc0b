#include <algorithm>
#include <deque>
#include <utility>

#include "training/answering.h"
#include "training/model_runner.h"

namespace sqz::training {
namespace {

// Questions that share steps, each in a slot of its own.
class Batch {
 public:
  Batch(const ModelConfig& config, StepEngine& engine, FixedContext* context,
        const BatchOptions& options, std::vector<float>* logits)
      : config_(config),
        engine_(engine),
        context_(context),
        options_(options),
        logits_(logits),
        slots_(static_cast<size_t>(options.width)) {}

  Status run() {
    for (;;) {
      if (started_.empty()) {
        SQZ_RETURN_IF_ERROR(join());
        if (running() == 0 && drained_) return {};
      }
      const bool ahead = engine_.runs_ahead() && greedy();
      while (std::ssize(started_) < (ahead ? 2 : 1)) {
        if (!started_.empty() && room_for_others()) break;  // they join when nothing is under way
        SQZ_ASSIGN_OR_RETURN(const bool more, start_tokens(ahead));
        if (!more) break;
      }
      if (!started_.empty()) SQZ_RETURN_IF_ERROR(finish_step());
    }
  }

 private:
  struct Running {
    Answering answering;
    int64_t index = 0;
    int64_t run = 0, most_run = 0;  // own tokens that steps were started for, and may be
  };
  struct Started {
    std::vector<int64_t> slots, indexes;
  };

  int64_t running() const {
    return std::count_if(slots_.begin(), slots_.end(), [](const auto& slot) { return !!slot; });
  }
  bool greedy() const {
    return std::all_of(slots_.begin(), slots_.end(),
                       [](const auto& slot) { return !slot || slot->answering.greedy(); });
  }
  // A prompt makes the others wait, so some join together, unless nobody is there to wait.
  bool room_for_others() const {
    const int64_t free = options_.width - running();
    return !drained_ && free >= std::max<int64_t>(1, options_.width / 8);
  }

  // New questions run their prompts, in as few steps as their lengths allow.
  Status join() {
    std::vector<StepPart> parts;
    int64_t tokens = 0;
    while (!drained_ && running() < options_.width && (!parts.empty() || room_for_others())) {
      SQZ_ASSIGN_OR_RETURN(auto question, options_.next(/*wait=*/running() == 0, drained_));
      if (!question) break;
      const int64_t first = context_ == nullptr ? 0 : context_->tokens();
      SQZ_RETURN_IF_ERROR(check_generate(config_, question->prompt, question->options, first));
      const auto slot = std::find(slots_.begin(), slots_.end(), nullptr) - slots_.begin();
      const auto count = static_cast<int64_t>(question->prompt.size());
      auto entered = std::make_unique<Running>(
          Running{Answering(config_, question->options, first + count), next_index_++, count, 0});
      entered->most_run = count + entered->answering.most() - 1;
      SQZ_RETURN_IF_ERROR(engine_.reserve(count + entered->answering.most()));
      if (tokens + count > kMaxContextTokens && !parts.empty()) {
        SQZ_RETURN_IF_ERROR(run_prompts(parts));
        tokens = 0;
      }
      slots_[static_cast<size_t>(slot)] = std::move(entered);
      tokens += count;
      parts.push_back({slot, 0, std::move(question->prompt)});
    }
    return parts.empty() ? Status() : run_prompts(parts);
  }

  Status run_prompts(std::vector<StepPart>& parts) {
    SQZ_RETURN_IF_ERROR(start(parts));
    parts.clear();
    return finish_step();
  }

  Status start(const std::vector<StepPart>& parts) {
    StepOptions step;
    step.context = context_;
    step.all_rows = logits_ != nullptr;
    step.logits = step.all_rows || !greedy();
    SQZ_RETURN_IF_ERROR(engine_.start(parts, step));
    Started& started = started_.emplace_back();
    for (const StepPart& part : parts) {
      started.slots.push_back(part.slot);
      started.indexes.push_back(slots_[static_cast<size_t>(part.slot)]->index);
    }
    return {};
  }

  // One more token of everybody whose answer may go on. False if nobody's may.
  Result<bool> start_tokens(bool ahead) {
    std::vector<StepPart> parts;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i] || slots_[i]->most_run <= slots_[i]->run) continue;
      StepPart part{static_cast<int64_t>(i), slots_[i]->run++, {}};
      if (!ahead) part.tokens = {slots_[i]->answering.last()};
      parts.push_back(std::move(part));
    }
    if (parts.empty()) return false;
    SQZ_RETURN_IF_ERROR(start(parts));
    return true;
  }

  Status finish_step() {
    SQZ_ASSIGN_OR_RETURN(const StepResult result, engine_.finish());
    const Started started = std::move(started_.front());
    started_.pop_front();
    if (logits_ != nullptr) {
      const float* all = result.logits.data_ptr<float>();
      logits_->insert(logits_->end(), all, all + result.logits.numel());
    }
    for (size_t i = 0; i < started.slots.size(); ++i) {
      auto& slot = slots_[static_cast<size_t>(started.slots[i])];
      if (!slot || slot->index != started.indexes[i]) continue;  // ended before this step did
      const size_t row = result.choices.size() - started.slots.size() + i;
      SQZ_ASSIGN_OR_RETURN(const bool more, slot->answering.take(result, row));
      if (more) continue;
      SQZ_RETURN_IF_ERROR(options_.done(slot->index, slot->answering.finish()));
      slot = nullptr;
    }
    return {};
  }

  const ModelConfig& config_;
  StepEngine& engine_;
  FixedContext* context_;
  const BatchOptions& options_;
  std::vector<float>* logits_;  // of every row; then there is one question
  std::vector<std::unique_ptr<Running>> slots_;
  std::deque<Started> started_;
  int64_t next_index_ = 0;
  bool drained_ = false;  // there are no more questions
};

// What a runner keeps with a context.
struct KeptEngine {
  const Transformer* transformer;
  std::unique_ptr<StepEngine> engine;
};

}  // namespace

Result<std::shared_ptr<StepEngine>> ModelRunner::engine(FixedContext* context, int64_t slots) {
  if (context != nullptr) {
    const auto kept = std::static_pointer_cast<KeptEngine>(context->runner_state);
    if (kept && kept->transformer == &transformer_ && kept->engine->slots() >= slots) {
      return std::shared_ptr<StepEngine>(kept, kept->engine.get());
    }
    SQZ_ASSIGN_OR_RETURN(auto graphs, make_graph_engine(transformer_, *context, slots));
    if (graphs) {
      const auto keep = std::make_shared<KeptEngine>(KeptEngine{&transformer_, std::move(graphs)});
      context->runner_state = keep;
      return std::shared_ptr<StepEngine>(keep, keep->engine.get());
    }
  }
  return std::shared_ptr<StepEngine>(make_layer_engine(transformer_, slots));
}

Status ModelRunner::generate_batch(const BatchOptions& options, FixedContext& context) {
  return guarded([&]() -> Status {
    if (options.width < 1) {
      return {Code::kInvalidArgument, concat("width ", options.width, ": expected 1 or more")};
    }
    SQZ_ASSIGN_OR_RETURN(const auto steps, engine(&context, options.width));
    return Batch(config(), *steps, &context, options, nullptr).run();
  });
}

Result<Generation> ModelRunner::generate(std::span<const int32_t> prompt,
                                         const GenerateOptions& options, FixedContext* context,
                                         std::vector<float>* logits) {
  return guarded([&]() -> Result<Generation> {
    if (logits != nullptr) logits->clear();
    BatchQuestion question{{prompt.begin(), prompt.end()}, options};
    SQZ_ASSIGN_OR_RETURN(const auto steps, engine(context, 1));
    if (options.check != nullptr) {
      return generate_checked(config(), *steps, question, *context);
    }
    Generation out;
    BatchOptions batch;
    bool asked = false;
    batch.next = [&](bool, bool& ended) -> Result<std::optional<BatchQuestion>> {
      ended = std::exchange(asked, true);
      return ended ? std::optional<BatchQuestion>() : std::optional(std::move(question));
    };
    batch.done = [&](int64_t, Generation generation) {
      out = std::move(generation);
      return Status();
    };
    SQZ_RETURN_IF_ERROR(Batch(config(), *steps, context, batch, logits).run());
    return out;
  });
}

}  // namespace sqz::training
