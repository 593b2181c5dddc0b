// The work of sqz-generate: answers prompts over the fixed context of an index, or of several.
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/stopwatch.h"
#include "formats/chat_format.h"
#include "formats/checkpoint.h"
#include "formats/sqz_file.h"
#include "formats/tokenizer.h"
#include "tools/common/index_context.h"
#include "tools/common/mains.h"
#include "tools/common/model_options.h"
#include "tools/common/selector_options.h"
#include "tools/common/texts.h"
#include "tools/common/tool.h"
#include "tools/sqz_generate/answer.h"
#include "training/runner.h"

namespace sqz {
namespace {

struct GenerateArguments {
  std::string model;
  std::vector<std::string> indexes;                // one behind the other
  std::vector<std::string> prompts, prompt_files;  // both empty: one a line of standard input
  int64_t batch = 0;  // prompts that are answered together; 0: one after the other
  bool dense = false, escapes = false;
  std::optional<bool> chat;  // put prompts into the user's turn; none: if the index has turns
  std::string run_dtype;
  GenerateOptions generate;
  SelectorOptions selector;
};

// Reads the next line of standard input, without its end; false behind the last one.
bool read_line(std::string& line) {
  if (!std::getline(std::cin, line)) return false;
  if (line.ends_with('\r')) line.pop_back();
  return true;
}

// The parts that are opened once, for all prompts.
struct Opened {
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<ChatFormat> chat;  // the turns that prompts are put into
  std::unique_ptr<Runner> runner;
  std::unique_ptr<IndexContext> context;
  double load_seconds = 0;
};

// The turns that the index was built with, if prompts are to be put into them.
Result<std::optional<ChatFormat>> open_chat(const GenerateArguments& arguments) {
  if (!arguments.chat.value_or(true)) return std::optional<ChatFormat>();
  const std::string& first = arguments.indexes.front();
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(first));
  SQZ_ASSIGN_OR_RETURN(std::optional<ChatFormat> chat, chat_of(*index));
  if (!chat && arguments.chat) {
    return Status(Code::kMismatch, concat(first,
                                          ": the index was built without --chat, so its text is "
                                          "not in a turn; build it with --chat F.json"));
  }
  if (!chat) warn_of_chat_template(arguments.model);
  return chat;
}

Result<Opened> open_all(const GenerateArguments& arguments, const ToolContext& context) {
  const Stopwatch watch;
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SelectorOptions selector = arguments.selector;
  if (arguments.dense) selector.selector = "dense";
  if (selector.selector == "dense" && selector.budget) {
    return Status(Code::kInvalidArgument,
                  "--budget: found it with --selector dense, which reads everything; give one");
  }
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(arguments.model));
  const ModelDescription& model = checkpoint->config().description;
  Opened out;
  SQZ_ASSIGN_OR_RETURN(out.tokenizer, Tokenizer::load(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto indexes, open_indexes(arguments.indexes, model,
                                                        out.tokenizer.get(), arguments.model));
  SQZ_ASSIGN_OR_RETURN(out.chat, open_chat(arguments));
  SQZ_RETURN_IF_ERROR(load_layers(selector, model));
  sqz_session_options session = session_options(selector, context.options.threads);
  const bool pruned = indexes[0]->info().partition == SQZ_PARTITION_PRUNED;
  if (pruned && !selector.budget) session.budget = 0;  // it has its own
  SQZ_ASSIGN_OR_RETURN(out.runner, Runner::load(arguments.model, runner_options(arguments.run_dtype,
                                                                                context.options)));
  if (const auto gpu = context.options.gpu()) {
    for (const auto& index : indexes) SQZ_RETURN_IF_ERROR(index->upload(*gpu));
  }
  SQZ_ASSIGN_OR_RETURN(out.context, IndexContext::create(indexes, session));
  out.load_seconds = watch.seconds();
  return out;
}

// How much of the context was read.
JsonMembers reading_json(const sqz_stats& stats) {
  return {{"budget", {{"asked", stats.asked_budget}, {"delivered", stats.delivered_budget}}},
          {"keep", {{"asked", stats.asked_keep}, {"delivered", stats.delivered_keep}}},
          {"dense_fallback", stats.dense_fallback != 0}};
}

double percent(double fraction) {
  return std::round(fraction * 1000) / 10;
}

// "read 14.2 % of the fixed context (asked for 12.5 %; ...)", with the reason why all of it was
// read.
std::string reading_text(const sqz_index_info& info, const sqz_stats& stats) {
  std::string asked;
  if (stats.asked_budget > 0) asked = concat(" (asked for ", percent(stats.asked_budget), " %");
  if (!asked.empty() && stats.dense_fallback != 0 && stats.asked_budget < 1) {
    asked += stats.keys_possible == 0 ? "; every layer has a sliding window and is read whole"
             : stats.least_budget < stats.asked_budget
                 ? "; to select would read no less"
                 : concat("; the least is ", percent(std::min(stats.least_budget, 1.0)),
                          " %, because the first ", info.sink, " and last ", info.tail, " of its ",
                          info.tokens, " tokens are always read");
  }
  return concat("read ", percent(stats.delivered_budget), " % of the fixed context", asked,
                asked.empty() ? "" : ")");
}

// Answers prompts, and collects the answers.
class Answers {
 public:
  Answers(const Opened& opened, const GenerateArguments& arguments, const ToolContext& context)
      : opened_(opened), arguments_(arguments), context_(context) {}

  // One by one, the text of an answer is shown as it comes. With --batch the texts are shown at the
  // end, in the order of the prompts.
  Status answer(const std::vector<std::string>& prompts) {
    const bool together = arguments_.batch > 0;
    std::vector<Question> questions(prompts.size());
    std::vector<Answer> texts;
    for (size_t i = 0; i < prompts.size(); ++i) {
      SQZ_ASSIGN_OR_RETURN(questions[i].prompt, encode(prompts[i]));
      texts.emplace_back(*opened_.tokenizer);
      questions[i].options = arguments_.generate;
      questions[i].options.on_token = [&texts, i, together, this](int32_t id) {
        const std::string more = texts[i].add(id);
        if (!together) context_.output.text(more);
        return true;
      };
    }
    const size_t before = answers_.size();
    answers_.resize(before + prompts.size());
    Progress progress(together ? context_.progress_style() : ProgressStyle::kNone, "answers");
    int64_t ended = 0;
    SQZ_RETURN_IF_ERROR(opened_.context->reset_stats());
    SQZ_RETURN_IF_ERROR(opened_.runner->generate_batch(
        questions, std::max<int64_t>(arguments_.batch, 1), *opened_.context,
        [&](int64_t index, const Generation& generation) -> Status {
          const auto i = static_cast<size_t>(index);
          const std::string rest = texts[i].finish();
          SQZ_RETURN_IF_ERROR(texts[i].status());
          JsonMembers& json = answers_[before + i];
          json = {{"index", before + i},
                  {"prompt", prompts[i]},
                  {"text", texts[i].text()},
                  {"tokens", generation.tokens},
                  {"stop_reason", generation.stop_reason},
                  {"seconds",
                   {{"load", opened_.load_seconds},
                    {"prefill", generation.prefill_seconds},
                    {"decode", generation.decode_seconds}}}};
          tokens_ += std::ssize(generation.tokens);
          if (!together) {
            context_.output.text(rest + "\n");
            SQZ_ASSIGN_OR_RETURN(JsonMembers reading, take_reading(std::ssize(generation.tokens),
                                                                   generation.prefill_seconds +
                                                                       generation.decode_seconds));
            json.merge(reading);
          }
          if (prompts.size() > 1 || asking_) context_.output.event("answer", json);
          progress.update(static_cast<double>(++ended) / static_cast<double>(prompts.size()));
          return Status();
        }));
    progress.finish();
    if (!together) return {};
    for (const Answer& text : texts) context_.output.text(text.text() + "\n");
    SQZ_ASSIGN_OR_RETURN(all_, take_reading(tokens_, watch_.seconds()));
    return {};
  }

  // Every line of standard input, one by one.
  Status ask() {
    asking_ = true;
    const bool terminal =
        ::isatty(STDIN_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1 && context_.options.quiet == 0;
    if (terminal) std::cerr << "One prompt a line; Ctrl-D leaves.\n";
    for (std::string line;;) {
      if (terminal) std::cerr << "> " << std::flush;
      if (!read_line(line)) break;
      if (!line.empty()) SQZ_RETURN_IF_ERROR(answer({line}));
    }
    if (terminal) std::cerr << "\n";
    return answers_.empty() && !terminal ? no_prompt() : Status();
  }

  // The answer if there is one alone, else all of them.
  void print() {
    if (!context_.output.json()) return;
    if (answers_.size() == 1 && !asking_) {
      answers_[0].merge(all_);
      return context_.output.result(answers_[0]);
    }
    const double seconds = watch_.seconds();
    all_["seconds"] = {{"load", opened_.load_seconds}, {"answers", seconds}};
    all_["tokens_per_second"] = static_cast<double>(tokens_) / seconds;
    all_["answers"] = answers_;
    context_.output.result(all_);
  }

  static Status no_prompt() {
    return {Code::kInvalidArgument,
            "no prompt: pass --prompt TEXT, --prompts FILE, or one a line on standard input"};
  }

 private:
  // The counts of reading since the last time, for `tokens` tokens of answers.
  Result<JsonMembers> take_reading(int64_t tokens, double seconds) {
    SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, opened_.context->stats());
    SQZ_RETURN_IF_ERROR(opened_.context->reset_stats());
    spdlog::debug("route: {}", stats.route);
    spdlog::info("{}, {} tokens in {:.2f} s", reading_text(opened_.context->info(), stats), tokens,
                 seconds);
    return reading_json(stats);
  }

  Result<std::vector<int32_t>> encode(const std::string& prompt) const {
    const Prompt one{arguments_.escapes ? unescape(prompt) : prompt, "prompt"};
    SQZ_ASSIGN_OR_RETURN(
        auto ids, encode_prompts(*opened_.tokenizer, {one}, opened_.runner->config().description,
                                 opened_.context->tokens(), opened_.chat));
    return std::move(ids.front());
  }

  const Opened& opened_;
  const GenerateArguments& arguments_;
  const ToolContext& context_;
  const Stopwatch watch_;
  std::vector<JsonMembers> answers_;
  JsonMembers all_;     // with --batch: what was read for all answers
  int64_t tokens_ = 0;  // of all answers
  bool asking_ = false;
};

// The prompts of the command line and of files; with --batch and neither, of standard input.
Result<std::vector<std::string>> given_prompts(const GenerateArguments& arguments) {
  std::vector<std::string> out = arguments.prompts;
  SQZ_ASSIGN_OR_RETURN(auto read, read_prompts(Env::posix(), arguments.prompt_files));
  for (Prompt& prompt : read) out.push_back(std::move(prompt.text));
  if (arguments.batch > 0 && out.empty()) {
    for (std::string line; read_line(line);) {
      if (!line.empty()) out.push_back(line);
    }
    if (out.empty()) return Answers::no_prompt();
  }
  return out;
}

void add_generate_options(CLI::App& app, GenerateArguments& arguments) {
  GenerateOptions& generate = arguments.generate;
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option(
         "-i,--index", arguments.indexes,
         "The index (.sqz) of the fixed context; repeated: of several, one behind the other")
      ->required()
      ->expected(1, SQZ_MOST_CONTEXTS)
      ->allow_extra_args(false);
  app.add_option("-p,--prompt", arguments.prompts,
                 "The prompt to answer; may be repeated. None: one prompt a line of standard input")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--prompts", arguments.prompt_files,
                 "Files of prompts: one a line, or in a *.jsonl the string `prompt` of each line")
      ->take_all()
      ->allow_extra_args(false);
  auto* dense = app.add_flag("--dense", arguments.dense, "Read everything: the reference");
  app.add_option("--max-tokens", generate.max_tokens, "Most tokens of an answer")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_flag("-e,--escapes", arguments.escapes, "Read \\n, \\t, \\r and \\\\ in prompts");
  app.add_flag_function(
      "--chat,!--no-chat", [&arguments](int64_t count) { arguments.chat = count > 0; },
      "Put prompts into the user's turn of a chat (default: if the index was built with --chat)");
  app.add_option("--batch", arguments.batch,
                 "Answer up to this many prompts together, which is faster on a CPU; 0: one after "
                 "the other")
      ->check(whole_number(0))
      ->capture_default_str();
  add_run_dtype_option(app, arguments.run_dtype);
  add_selector_options(app, arguments.selector, dense);
}

Status run_generate(const GenerateArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const std::vector<std::string> prompts, given_prompts(arguments));
  SQZ_ASSIGN_OR_RETURN(const Opened opened, open_all(arguments, context));
  GenerateArguments complete = arguments;
  if (opened.chat) {
    SQZ_ASSIGN_OR_RETURN(complete.generate.stop, end_tokens(*opened.tokenizer, *opened.chat));
  }
  Answers answers(opened, complete, context);
  SQZ_RETURN_IF_ERROR(prompts.empty() ? answers.ask() : answers.answer(prompts));
  answers.print();
  return {};
}

}  // namespace

int generate_main(int argc, char** argv) {
  Tool tool(
      "sqz-generate",
      "Answers prompts over the fixed context of an index, and reads the part that matters.",
      "The prompt follows the fixed context. It gets no special tokens; over an index built with\n"
      "--chat it stands in the user's turn. The likeliest token is always taken. To serve many "
      "prompts at speed, use vLLM with the\n"
      "plug-in sqz.vllm (examples/vllm).\n"
      "\n"
      "Result: prompt, text, tokens[], stop_reason, budget{asked, delivered}, keep{asked,\n"
      "delivered}, dense_fallback, seconds{load, prefill, decode}. Several prompts: an event\n"
      "`answer` each, and a result with answers[], seconds{load, answers} and tokens_per_second;\n"
      "with --batch budget and keep are there, because they are of all answers.\n"
      "\n"
      "Examples:\n"
      "  sqz-generate --model MODEL --index book.sqz --prompt 'Who is Mina?'\n"
      "  sqz-generate --model MODEL --index book.sqz --dense --prompt 'Who is Mina?'\n"
      "  sqz-generate --model MODEL --index book.sqz --budget 0.1 < prompts.txt\n"
      "  sqz-generate --model MODEL --index book.sqz --batch 8 --prompts questions.jsonl "
      "--json\n");
  GenerateArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const ToolContext& context) { return run_generate(arguments, context); });
  add_generate_options(*app, arguments);
  return tool.run(argc, argv);
}

}  // namespace sqz
