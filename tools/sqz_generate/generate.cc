#include "tools/sqz_generate/generate.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>

#include "formats/sqz_file.h"
#include "formats/tokenizer.h"
#include "tools/common/load_runner.h"
#include "tools/common/model_options.h"
#include "tools/common/signals.h"
#include "tools/common/texts.h"
#include "tools/sqz_generate/answer.h"
#include "tools/sqz_generate/index_context.h"

namespace sqz {
namespace {

using Clock = std::chrono::steady_clock;

// Everything that is opened once, whatever the number of prompts.
struct Opened {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Runner> runner;
  std::unique_ptr<IndexContext> context;
  double load_seconds = 0;
};

struct Answered {
  std::string text;
  Generation generation;
  sqz_stats stats = {};
};

// An index is of one model and one tokenizer; another one's answers would be nonsense.
Status check_index(const SqzFile& index, const ModelDescription& model, const Tokenizer& tokenizer,
                   const std::string& model_path) {
  const IndexMetadata& metadata = index.metadata();
  SQZ_RETURN_IF_ERROR(check_same_model(metadata.model, model, index.path()));
  if (!metadata.has_kv) {
    return {Code::kUnsupported,
            concat(index.path(),
                   ": the index holds no keys and values (it was built with --no-kv); "
                   "build it without --no-kv to generate from it")};
  }
  if (metadata.tokenizer_hash.empty() || metadata.tokenizer_hash == tokenizer.hash()) return {};
  return {Code::kMismatch,
          concat(index.path(), ": tokenizer: the index was built with ", metadata.tokenizer_hash,
                 ", ", model_path, " has ", tokenizer.hash(),
                 "; use the model that the index was built with, or build it again")};
}

Result<Opened> open_all(const GenerateArguments& arguments, const ToolContext& context) {
  const auto start = Clock::now();
  SelectorOptions selector = arguments.selector;
  if (arguments.dense) selector.selector = "dense";
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  SQZ_RETURN_IF_ERROR(load_layers(selector, index->metadata().model));
  SQZ_ASSIGN_OR_RETURN(sqz_session_options session,
                       session_options(selector, context.options.threads));
  Opened out;
  SQZ_ASSIGN_OR_RETURN(out.tokenizer, Tokenizer::load(arguments.model));
  const RunnerOptions options = runner_options(arguments.run_dtype, context.options);
  SQZ_ASSIGN_OR_RETURN(out.runner, load_runner(arguments.model, options));
  SQZ_RETURN_IF_ERROR(
      check_index(*index, out.runner->config().description, *out.tokenizer, arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto opened, OpenIndex::open(arguments.index, context.options.gpu()));
  SQZ_ASSIGN_OR_RETURN(out.context, IndexContext::create(opened, session));
  out.load_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return out;
}

Result<std::vector<int32_t>> encode_prompt(const Opened& opened, const std::string& prompt,
                                           const std::string& model_path) {
  std::vector<int32_t> ids;  // no BOS: the fixed context before it has it
  const Status status = opened.tokenizer->encode(prompt, false, ids);
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
  options.on_token = [&](int32_t id) { return answer.add(id) && !stop_requested(); };
  SQZ_RETURN_IF_ERROR(opened.context->reset_stats());
  Answered out;
  SQZ_ASSIGN_OR_RETURN(out.generation, opened.runner->generate(ids, options, opened.context.get()));
  SQZ_RETURN_IF_ERROR(check_stop());
  SQZ_RETURN_IF_ERROR(answer.status());
  answer.finish();
  out.text = answer.text();
  SQZ_ASSIGN_OR_RETURN(out.stats, opened.context->stats());
  return out;
}

JsonMembers answer_json(const Answered& answered, double load_seconds) {
  const sqz_stats& stats = answered.stats;
  return {{"text", answered.text},
          {"tokens", answered.generation.tokens},
          {"stop_reason", answered.generation.stop_reason},
          {"budget", {{"asked", stats.asked_budget}, {"delivered", stats.delivered_budget}}},
          {"keep", {{"asked", stats.asked_keep}, {"delivered", stats.delivered_keep}}},
          {"dense_fallback", stats.dense_fallback != 0},
          {"seconds",
           {{"load", load_seconds},
            {"prefill", answered.generation.prefill_seconds},
            {"decode", answered.generation.decode_seconds}}}};
}

void log_answer(const Answered& answered) {
  const sqz_stats& stats = answered.stats;
  const auto percent = [](double fraction) { return std::round(fraction * 1000) / 10; };
  spdlog::info("read {} % of the fixed context (asked for {} %), {} tokens in {:.2f} s",
               percent(stats.delivered_budget), percent(stats.asked_budget),
               answered.generation.tokens.size(),
               answered.generation.prefill_seconds + answered.generation.decode_seconds);
}

// One prompt; its text is shown as it comes on a terminal, at once elsewhere.
Result<Answered> serve(const Opened& opened, const GenerateArguments& arguments,
                       const std::string& prompt, const ToolContext& context) {
  const bool stream = !context.output.json() && ::isatty(STDOUT_FILENO) == 1;
  const auto show = [&](const std::string& piece) { context.output.text(piece); };
  const std::string text = arguments.escapes ? unescape(prompt) : prompt;
  SQZ_ASSIGN_OR_RETURN(
      Answered answered,
      answer_prompt(opened, arguments, text,
                    stream ? std::function<void(const std::string&)>(show) : nullptr));
  context.output.text((stream ? "" : answered.text) + "\n");
  log_answer(answered);
  return answered;
}

Status serve_lines(const Opened& opened, const GenerateArguments& arguments,
                   const ToolContext& context) {
  std::vector<JsonMembers> answers;
  for (std::string line; std::getline(std::cin, line);) {
    if (line.empty()) continue;
    SQZ_RETURN_IF_ERROR(check_stop());
    SQZ_ASSIGN_OR_RETURN(const Answered answered, serve(opened, arguments, line, context));
    JsonMembers json = answer_json(answered, opened.load_seconds);
    json["prompt"] = line;
    context.output.event("answer", json);
    answers.push_back(std::move(json));
  }
  if (answers.empty()) {
    return {Code::kInvalidArgument,
            "no prompt was given: pass --prompt TEXT, or one prompt a line on standard input"};
  }
  context.output.result({{"answers", answers}}, {});
  return {};
}

}  // namespace

void add_generate_options(CLI::App& app, GenerateArguments& arguments) {
  GenerateOptions& generate = arguments.generate;
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-i,--index", arguments.index, "The index (.sqz) of the fixed context")
      ->required();
  app.add_option("-p,--prompt", arguments.prompt,
                 "What to answer; none or -: one prompt a line of standard input");
  app.add_flag("--dense", arguments.dense, "Read everything: the reference (--selector dense)");
  app.add_flag("-e,--escapes", arguments.escapes,
               "Read \\n, \\t, \\r and \\\\ in prompts and stops");
  app.add_option("--max-tokens", generate.max_tokens, "Most tokens of an answer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--temperature", generate.temperature, "0: always the likeliest token")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--top-p", generate.top_p, "Sample from the likeliest tokens of this total")
      ->check(CLI::Range(1e-6, 1.0))
      ->capture_default_str();
  app.add_option("--stop", arguments.stop, "End the answer before this text; may be repeated")
      ->take_all();
  app.add_option("--run-dtype", arguments.run_dtype, "What the model computes in")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  add_selector_options(app, arguments.selector);
}

Status run_generate(const GenerateArguments& arguments, const ToolContext& context) {
  if (std::any_of(arguments.stop.begin(), arguments.stop.end(),
                  [](const std::string& stop) { return stop.empty(); })) {
    return {Code::kInvalidArgument, "--stop: an empty text would end every answer at once"};
  }
  GenerateArguments seeded = arguments;
  seeded.generate.seed = context.options.seed;
  SQZ_ASSIGN_OR_RETURN(const Opened opened, open_all(seeded, context));
  if (arguments.prompt.empty() || arguments.prompt == "-") {
    return serve_lines(opened, seeded, context);
  }
  SQZ_ASSIGN_OR_RETURN(const Answered answered, serve(opened, seeded, arguments.prompt, context));
  if (context.output.json()) {
    context.output.result(answer_json(answered, opened.load_seconds), {});
  }
  return {};
}

}  // namespace sqz
