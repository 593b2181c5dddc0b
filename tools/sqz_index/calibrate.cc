#include "formats/tokenizer.h"
#include "tools/common/calibration.h"
#include "tools/common/load_runner.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/prompts.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct CalibrateArguments {
  std::string index, output;
  std::string model, run_dtype;
  std::vector<std::string> prompts;
  int64_t answer_tokens = kAnswerTokens;
  bool force = false;
};

// An index of another tokenizer would be asked in another language.
Status check_tokenizer(const SqzFile& index, const Tokenizer& tokenizer, const std::string& model) {
  const std::string& built = index.metadata().tokenizer_hash;
  if (built.empty() || built == tokenizer.hash()) return {};
  return {Code::kMismatch, bad_field(index.path(), "tokenizer_hash", built,
                                     concat(tokenizer.hash(), ", that of ", model,
                                            "; use the model that the index was built with"))};
}

Status run_calibrate(const CalibrateArguments& arguments, const ToolContext& context) {
  const std::string& output = arguments.output.empty() ? arguments.index : arguments.output;
  const bool in_place = output == arguments.index;
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  SQZ_RETURN_IF_ERROR(check_prompts_possible(*index));
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto prompts, read_prompts(Env::posix(), arguments.prompts));
  SQZ_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(arguments.model));
  SQZ_RETURN_IF_ERROR(check_tokenizer(*index, *tokenizer, arguments.model));
  SQZ_ASSIGN_OR_RETURN(const std::optional<ChatFormat> chat, chat_of(*index));
  CalibrationPrompts calibration;
  calibration.answer_tokens = arguments.answer_tokens;
  SQZ_ASSIGN_OR_RETURN(
      calibration.prompts,
      encode_prompts(*tokenizer, prompts, index->metadata().model, index->metadata().tokens, chat));
  SQZ_RETURN_IF_ERROR(check_output(output, arguments.force || in_place, arguments.prompts));
  SQZ_ASSIGN_OR_RETURN(
      const auto runner,
      load_runner(arguments.model, runner_options(arguments.run_dtype, context.options)));

  Progress progress(context.progress_style(), "calibrate");
  const RecalibrateOptions options{arguments.force || in_place, context.options.threads};
  SQZ_ASSIGN_OR_RETURN(
      const uint64_t bytes,
      calibrate_with_prompts(*runner, arguments.index, calibration, output, options,
                             [&](double done) { progress.update(done); }));
  progress.finish();
  SQZ_ASSIGN_OR_RETURN(const auto calibrated, SqzFile::open(output));
  SQZ_ASSIGN_OR_RETURN(const Calibration result, calibrated->calibration());
  context.output.result({{"path", output},
                         {"bytes", bytes},
                         {"prompts", prompts.size()},
                         {"queries", result.queries},
                         {"source", result.source}});
  return {};
}

}  // namespace

void add_calibrate_command(Tool& tool) {
  const auto arguments = std::make_shared<CalibrateArguments>();
  CLI::App* app = tool.command(
      "calibrate", "Calibrate an index anew with prompts like those it will be asked.",
      "The thresholds are set from prompts like those that the index will be asked, so that it\n"
      "delivers the budget that is asked for. Each prompt is run after the context and answered\n"
      "greedily over all keys: its queries calibrate prompts, those of the answer calibrate\n"
      "generation. A dozen are enough. Queries of the context's last tokens no longer count.\n"
      "\n"
      "The index is replaced when the new one is whole; -o writes another file instead. Refused: "
      "an\n"
      "index of another model or tokenizer, a damaged one, one without keys and values.\n"
      "\n"
      "Result: path, bytes, prompts, queries, source.\n"
      "\n"
      "Examples:\n"
      "  sqz-index calibrate book.sqz --model MODEL --prompts questions.txt\n"
      "  sqz-index calibrate book.sqz --model MODEL --prompts chats.jsonl -o calibrated.sqz\n",
      [arguments](const ToolContext& context) { return run_calibrate(*arguments, context); });
  app->add_option("INDEX", arguments->index, "The index (.sqz)")->required();
  app->add_option("-m,--model", arguments->model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app->add_option("--prompts", arguments->prompts,
                  "Prompts, one a line; in F.jsonl objects with \"prompt\". May be repeated")
      ->required()
      ->take_all();
  app->add_option("-o,--output", arguments->output, "Where to write (default: in place)");
  app->add_flag("--force", arguments->force, "Replace an existing output of -o");
  app->add_option("--answer-tokens", arguments->answer_tokens,
                  "Tokens of each greedy answer that count beside the prompt")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  add_run_dtype_option(*app, arguments->run_dtype);
}

}  // namespace sqz
