#include "tools/sqz_generate/generate.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>

#include "formats/base/stopwatch.h"
#include "formats/chat_format.h"
#include "formats/checkpoint.h"
#include "formats/sqz_file.h"
#include "formats/tokenizer.h"
#include "tools/common/index_table.h"
#include "tools/common/line_reader.h"
#include "tools/common/load_runner.h"
#include "tools/common/model_options.h"
#include "tools/common/prompts.h"
#include "tools/common/signals.h"
#include "tools/common/texts.h"
#include "tools/sqz_generate/answer.h"
#include "tools/sqz_generate/batch.h"
#include "tools/sqz_generate/index_context.h"

namespace sqz {
namespace {

// Everything that is opened once, whatever the number of prompts.
struct Opened {
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<ChatFormat> chat;  // the turns that prompts are put into
  std::unique_ptr<Runner> runner;
  std::unique_ptr<IndexContext> context;
  std::unique_ptr<IndexContext> whole;  // with --lossless: reads everything
  double load_seconds = 0;
  std::string index_path;
  bool threshold_rule = false;
};

struct Answered {
  std::string text;
  Generation generation;
  sqz_stats stats = {};
};

// An index is of one model and one tokenizer; another one's answers would be nonsense.
Status check_index(const sqz_index_info& index, const ModelDescription& model,
                   const Tokenizer& tokenizer, const GenerateArguments& arguments) {
  if (fingerprint(model) != index.model_fingerprint) {  // only the file says in which field
    SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(arguments.index));
    return check_same_model(file->metadata().model, model, arguments.index);
  }
  const std::string built_with = index.tokenizer_hash;
  if (built_with.empty() || built_with == tokenizer.hash()) return {};
  return {Code::kMismatch,
          concat(arguments.index, ": tokenizer: the index was built with ", built_with, ", ",
                 arguments.model, " has ", tokenizer.hash(),
                 "; use the model that the index was built with, or build it again")};
}

// The turns that the index was built with, if prompts are to be put into them.
Result<std::optional<ChatFormat>> open_chat(const GenerateArguments& arguments) {
  if (!arguments.chat.value_or(true)) return std::optional<ChatFormat>();
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  SQZ_ASSIGN_OR_RETURN(std::optional<ChatFormat> chat, chat_of(*index));
  if (!chat && arguments.chat) {
    return Status(Code::kMismatch,
                  concat(arguments.index,
                         ": the index was built without --chat: its text stands in "
                         "no turn; build it with --chat"));
  }
  if (!chat) warn_of_chat_template(arguments.model);
  return chat;
}

Result<Opened> open_all(const GenerateArguments& arguments, const ToolContext& context) {
  const Stopwatch watch;
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SelectorOptions selector = arguments.selector;
  if (arguments.dense) selector.selector = "dense";
  SQZ_ASSIGN_OR_RETURN(const auto index, OpenIndex::open(arguments.index));
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(arguments.model));
  const ModelDescription& model = checkpoint->config().description;
  Opened out;
  SQZ_ASSIGN_OR_RETURN(out.tokenizer, Tokenizer::load(arguments.model));
  SQZ_RETURN_IF_ERROR(check_index(index->info(), model, *out.tokenizer, arguments));
  SQZ_ASSIGN_OR_RETURN(out.chat, open_chat(arguments));
  SQZ_RETURN_IF_ERROR(load_layers(selector, model));
  SQZ_ASSIGN_OR_RETURN(sqz_session_options session,
                       session_options(selector, context.options.threads));
  const bool pruned = index->info().partition == SQZ_PARTITION_PRUNED;
  if (pruned && !selector.budget) session.budget = 0;  // it has its own
  out.threshold_rule = session.rule == SQZ_RULE_THRESHOLD;
  out.index_path = arguments.index;
  const RunnerOptions options = runner_options(arguments.run_dtype, context.options);
  SQZ_ASSIGN_OR_RETURN(out.runner, load_runner(arguments.model, options));
  if (const auto gpu = context.options.gpu()) SQZ_RETURN_IF_ERROR(index->upload(*gpu));
  SQZ_ASSIGN_OR_RETURN(out.context, IndexContext::create(index, session));
  if (arguments.lossless) {
    sqz_session_options whole = {};
    whole.struct_size = sizeof(whole);
    whole.selector = SQZ_SELECTOR_DENSE;
    whole.threads = session.threads;
    SQZ_ASSIGN_OR_RETURN(out.whole, IndexContext::create(index, whole));
  }
  out.load_seconds = watch.seconds();
  return out;
}

Result<std::vector<int32_t>> encode_prompt(const Opened& opened, const std::string& prompt,
                                           const std::string& model_path) {
  std::vector<int32_t> ids;  // no BOS: the fixed context before it has it
  const Status status = opened.chat ? encode_question(*opened.tokenizer, *opened.chat, prompt, ids)
                                    : opened.tokenizer->encode(prompt, false, ids);
  if (!status.ok()) return Status(status.code(), concat("prompt: ", status.message()));
  if (ids.empty()) return Status(Code::kInvalidArgument, "the prompt is empty");
  const ModelDescription& model = opened.runner->config().description;
  const int32_t highest = *std::max_element(ids.begin(), ids.end());
  if (highest >= model.vocab_size) {
    return Status(Code::kMismatch,
                  concat("the tokenizer of ", model_path, " gives token id ", highest,
                         ", but the model's vocabulary has ", model.vocab_size, " entries"));
  }
  const auto total = opened.context->tokens() + static_cast<int64_t>(ids.size());
  if (total <= model.max_positions) return ids;
  return Status(Code::kUnsupported, concat("fixed context and prompt have ", total, " tokens, but ",
                                           model_path, " has ", model.max_positions,
                                           " positions; build the index of a shorter text"));
}

Result<Answered> answer_prompt(const Opened& opened, const GenerateArguments& arguments,
                               const std::string& prompt,
                               const std::function<void(const std::string&)>& show) {
  SQZ_ASSIGN_OR_RETURN(const auto ids, encode_prompt(opened, prompt, arguments.model));
  std::vector<std::string> stops = arguments.stop;
  if (arguments.escapes) std::transform(stops.begin(), stops.end(), stops.begin(), unescape);
  Answer answer(*opened.tokenizer, stops, show);
  GenerateOptions options = arguments.generate;
  options.check = opened.whole.get();
  Answered out;
  std::vector<int32_t> tokens;
  const auto ended = [] { return interrupted() || stop_requested(); };
  options.on_token = [&](int32_t id) {
    tokens.push_back(id);
    return answer.add(id) && !ended();
  };
  SQZ_RETURN_IF_ERROR(opened.context->reset_stats());
  const Stopwatch watch;
  auto generation = opened.runner->generate(ids, options, opened.context.get());
  if (generation.ok()) {
    out.generation = std::move(*generation);
  } else if (ended()) {  // in the middle of a token
    out.generation.tokens = tokens;
    out.generation.decode_seconds = watch.seconds();
  } else {
    return generation.status();
  }
  if (ended()) out.generation.stop_reason = "interrupted";
  SQZ_RETURN_IF_ERROR(answer.status());
  answer.finish();
  out.text = answer.text();
  SQZ_ASSIGN_OR_RETURN(out.stats, opened.context->stats());
  spdlog::debug("route: {}", out.stats.route);
  return out;
}

// How much of the context was read.
JsonMembers reading_json(const sqz_stats& stats) {
  JsonMembers out = {
      {"budget", {{"asked", stats.asked_budget}, {"delivered", stats.delivered_budget}}},
      {"keep", {{"asked", stats.asked_keep}, {"delivered", stats.delivered_keep}}},
      {"dense_fallback", stats.dense_fallback != 0}};
  if (stats.asked_mass > 0) {
    out["mass"] = {{"asked", stats.asked_mass},
                   {"estimated", stats.estimated_mass},
                   {"delivered", stats.delivered_mass},
                   {"error", stats.estimated_error}};
  }
  return out;
}

JsonMembers answer_json(const Answered& answered, double load_seconds) {
  const Generation& generation = answered.generation;
  JsonMembers json = reading_json(answered.stats);
  json["text"] = answered.text;
  json["tokens"] = generation.tokens;
  json["stop_reason"] = generation.stop_reason;
  json["seconds"] = {{"load", load_seconds},
                     {"prefill", generation.prefill_seconds},
                     {"decode", generation.decode_seconds}};
  if (generation.checks > 0) {
    json["drafts"] = {{"tokens", generation.drafted},
                      {"accepted", generation.accepted},
                      {"steps", generation.draft_steps},
                      {"checks", generation.checks}};
  }
  return json;
}

double percent(double fraction) {
  return std::round(fraction * 1000) / 10;
}

// Whether the thresholds in use are those of the context's own last tokens.
bool uncalibrated(const Opened& opened) {
  if (!opened.threshold_rule) return false;
  const auto index = SqzFile::open(opened.index_path);
  if (!index.ok()) return false;
  const auto calibration = (*index)->calibration();
  return calibration.ok() && calibration->source == kTailSource;
}

// Why another part of the context was read than was asked for; "" where there is nothing to say.
std::string reading_note(const Opened& opened, const sqz_stats& stats) {
  if (stats.asked_budget <= 0 || stats.asked_budget >= 1 || stats.selections == 0) return "";
  if (stats.dense_fallback != 0) {
    const sqz_index_info& info = opened.context->info();
    if (stats.keys_possible == 0) return "; every layer has a sliding window and is read whole";
    if (stats.least_budget < stats.asked_budget) return "; selecting would read no less";
    return concat("; the least is ", percent(std::min(stats.least_budget, 1.0)),
                  " %, for the first ", info.sink, " and last ", info.tail, " of its ", info.tokens,
                  " tokens ",
                  info.levels > 0      ? "and centroids "
                  : info.page_size > 0 ? "and bounds of pages "
                                       : "",
                  "are always read");
  }
  const bool off = std::abs(stats.delivered_budget / stats.asked_budget - 1) > 0.05;
  return off && uncalibrated(opened) ? "; not calibrated with prompts: sqz-index calibrate" : "";
}

// A mass and thresholds ask for no part of the context that is known before.
std::string asked_text(const SelectorOptions& selector, const sqz_stats& stats) {
  if (stats.asked_budget > 0) return concat(percent(stats.asked_budget), " %");
  if (selector.mass) return concat("a mass of ", *selector.mass);
  return "thresholds of " + CLI::detail::join(selector.thresholds, ", ");
}

void log_answer(const Opened& opened, const SelectorOptions& selector, const Answered& answered) {
  const sqz_stats& stats = answered.stats;
  spdlog::info("{}{} {} % of the fixed context (asked for {}{}), {} tokens in {:.2f} s",
               answered.generation.stop_reason == "interrupted" ? "interrupted; " : "",
               opened.whole ? "drafts read" : "read", percent(stats.delivered_budget),
               asked_text(selector, stats), reading_note(opened, stats),
               answered.generation.tokens.size(),
               answered.generation.prefill_seconds + answered.generation.decode_seconds);
}

// One prompt; its text is shown as it comes.
Result<Answered> serve(const Opened& opened, const GenerateArguments& arguments,
                       const std::string& prompt, const ToolContext& context) {
  const std::string text = arguments.escapes ? unescape(prompt) : prompt;
  const auto show = [&](const std::string& piece) { context.output.text(piece); };
  SQZ_ASSIGN_OR_RETURN(Answered answered, answer_prompt(opened, arguments, text, show));
  context.output.text("\n");
  log_answer(opened, arguments.selector, answered);
  return answered;
}

// Those of the command line and of files; none: they come from standard input.
Result<std::vector<std::string>> given_prompts(const GenerateArguments& arguments) {
  std::vector<std::string> out = arguments.prompts;
  if (arguments.prompt_files.empty()) return out;
  SQZ_ASSIGN_OR_RETURN(auto read, read_prompts(Env::posix(), arguments.prompt_files));
  for (Prompt& prompt : read) out.push_back(std::move(prompt.text));
  return out;
}

// Prompts from wherever they come, one after the other or together.
class Loop {
 public:
  Loop(const Opened& opened, const GenerateArguments& arguments, const ToolContext& context)
      : opened_(opened), arguments_(arguments), context_(context) {}

  Status answer(const std::string& prompt) {
    SQZ_ASSIGN_OR_RETURN(const Answered answered, serve(opened_, arguments_, prompt, context_));
    JsonMembers json = answer_json(answered, opened_.load_seconds);
    json["prompt"] = prompt;
    context_.output.event("answer", json);
    answers_.push_back(std::move(json));
    tokens_ += answered.generation.tokens.size();
    return check_stop();
  }

  // Every line of standard input; at a terminal the user is asked for it.
  Status answer_lines() {
    asked_ = ::isatty(STDIN_FILENO) == 1 && !context_.output.json();
    const bool visible = asked_ && ::isatty(STDERR_FILENO) == 1 && context_.options.quiet == 0;
    LineReader lines(STDIN_FILENO);
    for (std::string line;;) {
      if (visible) std::cerr << "> " << std::flush;
      const bool more = lines.next(line);
      if (visible && !more) std::cerr << "\n";
      if (!more) return check_stop();
      if (line.empty()) continue;
      std::optional<Interruptible> piece;
      if (asked_) piece.emplace();
      SQZ_RETURN_IF_ERROR(answer(line));
    }
  }

  // Prompts that are answered together: as they come with --json, else in their order.
  Status answer_together() {
    Batch batch;
    batch.width = arguments_.batch;
    batch.generate = arguments_.generate;
    batch.stops = arguments_.stop;
    if (arguments_.escapes) {
      std::transform(batch.stops.begin(), batch.stops.end(), batch.stops.begin(), unescape);
    }
    SQZ_ASSIGN_OR_RETURN(auto prompts, given_prompts(arguments_));
    const auto count = std::ssize(prompts);  // 0: nobody knows
    batch.next = count == 0 ? prompts_from(STDIN_FILENO) : prompts_of(std::move(prompts));
    batch.encode = [&](const std::string& prompt) {
      return encode_prompt(opened_, arguments_.escapes ? unescape(prompt) : prompt,
                           arguments_.model);
    };
    Progress progress(count == 0 ? ProgressStyle::kNone : context_.progress_style(), "answers");
    std::map<int64_t, std::string> waiting;  // for those before them
    int64_t shown = 0, ended = 0;
    batch.answered = [&](const BatchAnswer& answer) {
      const Generation& generation = answer.generation;
      JsonMembers json = {
          {"index", answer.index},
          {"prompt", answer.prompt},
          {"text", answer.text},
          {"tokens", generation.tokens},
          {"stop_reason", generation.stop_reason},
          {"seconds",
           {{"prefill", generation.prefill_seconds}, {"decode", generation.decode_seconds}}}};
      context_.output.event("answer", json);
      answers_.resize(std::max(answers_.size(), static_cast<size_t>(answer.index) + 1));
      answers_[static_cast<size_t>(answer.index)] = std::move(json);
      tokens_ += generation.tokens.size();
      waiting[answer.index] = answer.text;
      for (; !waiting.empty() && waiting.begin()->first == shown; ++shown) {
        context_.output.text(waiting.begin()->second + "\n");
        waiting.erase(waiting.begin());
      }
      if (count > 0) progress.update(static_cast<double>(++ended) / static_cast<double>(count));
    };
    const Stopwatch watch;
    SQZ_RETURN_IF_ERROR(opened_.context->reset_stats());
    SQZ_RETURN_IF_ERROR(answer_batch(*opened_.runner, *opened_.context, *opened_.tokenizer, batch));
    const double seconds = watch.seconds();
    progress.finish();
    SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, opened_.context->stats());
    totals_ = reading_json(stats);
    totals_["seconds"] = {{"load", opened_.load_seconds}, {"answers", seconds}};
    totals_["tokens_per_second"] = static_cast<double>(tokens_) / seconds;
    spdlog::info("{} at a time: {:.1f} tokens/s, {:.2f} answers/s; read {} % of the fixed context",
                 arguments_.batch, static_cast<double>(tokens_) / seconds,
                 static_cast<double>(answers_.size()) / seconds, percent(stats.delivered_budget));
    return check_stop();
  }

  Status finish(const Status& status) {
    if (!status.ok() && status.code() != Code::kCancelled) return status;
    if (answers_.empty() && status.ok() && !asked_) {
      return {Code::kInvalidArgument,
              "no prompt was given: pass --prompt TEXT, or one prompt a line on standard input"};
    }
    totals_["answers"] = answers_;
    context_.output.result(totals_, {});
    spdlog::info("{} answers, {} tokens", answers_.size(), tokens_);
    return status;
  }

 private:
  const Opened& opened_;
  const GenerateArguments& arguments_;
  const ToolContext& context_;
  std::vector<JsonMembers> answers_;
  JsonMembers totals_;
  size_t tokens_ = 0;
  bool asked_ = false;  // the user, at a terminal
};

}  // namespace

void add_generate_options(CLI::App& app, GenerateArguments& arguments) {
  GenerateOptions& generate = arguments.generate;
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-i,--index", arguments.index, "The index (.sqz) of the fixed context")
      ->required();
  app.add_option("-p,--prompt", arguments.prompts,
                 "What to answer; none or -: one prompt a line of standard input. May be repeated")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--prompts", arguments.prompt_files,
                 "Files of prompts: one a line, or in a *.jsonl the string `prompt` of each line")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--batch", arguments.batch,
                 "Answer up to this many prompts together; 0: one after the other")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_flag("--lossless", arguments.lossless,
               "Draft with the selection, and keep what --dense would say");
  app.add_flag_function(
      "--chat,!--no-chat", [&arguments](int64_t count) { arguments.chat = count > 0; },
      "Put prompts into the user's turn of a chat (default: if the index was built with --chat)");
  app.add_flag("--dense", arguments.dense, "Read everything: the reference (--selector dense)");
  app.add_flag("-e,--escapes", arguments.escapes,
               "Read \\n, \\t, \\r and \\\\ in prompts and stops");
  app.add_option("--max-tokens", generate.max_tokens, "Most tokens of an answer")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("--temperature", generate.temperature, "0: always the likeliest token")
      ->check(real_number(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--top-p", generate.top_p, "Sample from the likeliest tokens of this total")
      ->check(real_number(1e-6, 1.0))
      ->capture_default_str();
  app.add_option("--stop", arguments.stop, "End the answer before this text; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--run-dtype", arguments.run_dtype, "What the model computes in")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  add_selector_options(app, arguments.selector);
  app.final_callback([&app, &arguments] {
    const bool named = arguments.selector.selector == "dense";
    if (!arguments.dense && !named) return;
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
      if (option->get_group() == kSelectionSection) names.push_back(option->get_name());
    }
    if (named) std::erase(names, "--selector");
    refuse_given(app, names,
                 concat(named ? "--selector dense" : "--dense",
                        " reads everything, however it is selected: pass one of the two"));
  });
}

Status run_generate(const GenerateArguments& arguments, const ToolContext& context) {
  if (std::any_of(arguments.stop.begin(), arguments.stop.end(),
                  [](const std::string& stop) { return stop.empty(); })) {
    return {Code::kInvalidArgument, "--stop: an empty text would end every answer at once"};
  }
  const auto& given = arguments.prompts;
  const bool lines = std::find(given.begin(), given.end(), "-") != given.end();
  if (arguments.batch > 0 && lines && (given.size() > 1 || !arguments.prompt_files.empty())) {
    return {Code::kInvalidArgument,
            "--prompt -: with --batch it must be the only prompt; pass the lines by --prompts F"};
  }
  const bool dense = arguments.dense || arguments.selector.selector == "dense";
  if (arguments.lossless && (arguments.batch > 0 || dense)) {
    return {Code::kInvalidArgument,
            "--lossless: found --batch, --dense or --selector dense, expected none of them"};
  }
  GenerateArguments seeded = arguments;
  if (arguments.batch > 0 && lines) seeded.prompts.clear();
  seeded.generate.seed = context.options.seed;
  SQZ_ASSIGN_OR_RETURN(const Opened opened, open_all(seeded, context));
  if (opened.chat) {
    SQZ_ASSIGN_OR_RETURN(seeded.generate.stop, end_tokens(*opened.tokenizer, *opened.chat));
  }
  if (arguments.batch > 0) {
    Loop loop(opened, seeded, context);
    return loop.finish(loop.answer_together());
  }
  SQZ_ASSIGN_OR_RETURN(std::vector<std::string> prompts, given_prompts(arguments));
  if (prompts.empty()) prompts.emplace_back("-");
  if (prompts.size() == 1 && prompts.front() != "-") {
    SQZ_ASSIGN_OR_RETURN(const Answered answered, serve(opened, seeded, prompts.front(), context));
    if (context.output.json()) {
      context.output.result(answer_json(answered, opened.load_seconds), {});
    }
    return check_stop();
  }
  Loop loop(opened, seeded, context);
  Status status;
  for (const std::string& prompt : prompts) {
    status = prompt == "-" ? loop.answer_lines() : loop.answer(prompt);
    if (!status.ok()) break;
  }
  return loop.finish(status);
}

}  // namespace sqz
