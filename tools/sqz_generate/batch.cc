#include "tools/sqz_generate/batch.h"

#include <map>
#include <memory>

#include "tools/common/line_reader.h"
#include "tools/common/signals.h"
#include "tools/sqz_generate/answer.h"

namespace sqz {
namespace {

// A prompt that is being answered.
struct Open {
  std::string prompt;
  std::shared_ptr<Answer> answer;
};

}  // namespace

Status answer_batch(Runner& runner, FixedContext& context, const Tokenizer& tokenizer,
                    const Batch& batch) {
  std::map<int64_t, Open> open;  // by index
  int64_t count = 0;
  BatchOptions options;
  options.width = batch.width;
  options.next = [&](bool wait, bool& ended) -> Result<std::optional<BatchQuestion>> {
    SQZ_ASSIGN_OR_RETURN(auto prompt, batch.next(wait, ended));
    ended = ended || stop_requested();
    if (!prompt || stop_requested()) return std::optional<BatchQuestion>();
    BatchQuestion question;
    question.options = batch.generate;
    SQZ_ASSIGN_OR_RETURN(question.prompt, batch.encode(*prompt));
    const auto answer = std::make_shared<Answer>(tokenizer, batch.stops, nullptr);
    question.options.on_token = [answer](int32_t id) {
      return answer->add(id) && !stop_requested();
    };
    open[count++] = {*std::move(prompt), answer};
    return std::optional(std::move(question));
  };
  options.done = [&](int64_t index, Generation generation) -> Status {
    const Open ended = std::move(open.at(index));
    open.erase(index);
    SQZ_RETURN_IF_ERROR(ended.answer->status());
    if (stop_requested()) generation.stop_reason = "interrupted";
    batch.answered({index, ended.prompt, ended.answer->text(), std::move(generation)});
    return {};
  };
  return runner.generate_batch(options, context);
}

std::function<Result<std::optional<std::string>>(bool, bool&)> prompts_of(
    std::vector<std::string> prompts) {
  const auto left = std::make_shared<std::vector<std::string>>(prompts.rbegin(), prompts.rend());
  return [left](bool, bool& ended) -> Result<std::optional<std::string>> {
    ended = left->empty();
    if (ended) return std::optional<std::string>();
    std::optional<std::string> next = std::move(left->back());
    left->pop_back();
    return next;
  };
}

std::function<Result<std::optional<std::string>>(bool, bool&)> prompts_from(int descriptor) {
  const auto lines = std::make_shared<LineReader>(descriptor);
  return [lines](bool wait, bool& ended) -> Result<std::optional<std::string>> {
    std::string line;
    while (wait || lines->ready()) {
      ended = !lines->next(line);
      if (ended) return std::optional<std::string>();
      if (!line.empty()) return std::optional(line);
    }
    return std::optional<std::string>();
  };
}

}  // namespace sqz
