// The commands that make an index of another one: calibrate, compress, prune.
#include "formats/tokenizer.h"
#include "libindex/compress.h"
#include "libindex/prune.h"
#include "libruntime/select/registry.h"
#include "tools/common/calibration.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/selector_options.h"
#include "tools/common/texts.h"
#include "tools/sqz_index/build_options.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

// Returns the option of the output.
CLI::Option* add_files(CLI::App& app, std::string& index, std::string& output, bool& force) {
  app.add_option("INDEX", index, "The index (.sqz)")->required();
  app.add_flag("--force", force, "Replace an existing output");
  return app.add_option("-o,--output", output, "The index to write");
}

struct CalibrateArguments {
  std::string index, output;
  std::string model, run_dtype;
  std::vector<std::string> prompts;
  CalibrationPrompts calibration;
  bool force = false;
};

Status run_calibrate(const CalibrateArguments& arguments, const ToolContext& context) {
  const std::string& output = arguments.output.empty() ? arguments.index : arguments.output;
  const bool in_place = output == arguments.index;
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  SQZ_RETURN_IF_ERROR(check_calibratable(*index));
  if (!index->metadata().after.empty()) {
    return {Code::kUnsupported, concat(arguments.index,
                                       ": the index was made --after others, and "
                                       "prompts are answered over one index alone")};
  }
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto prompts, read_prompts(Env::posix(), arguments.prompts));
  SQZ_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(arguments.model));
  SQZ_RETURN_IF_ERROR(check_tokenizer(arguments.index, index->metadata().tokenizer_hash, *tokenizer,
                                      arguments.model));
  SQZ_ASSIGN_OR_RETURN(const std::optional<ChatFormat> chat, chat_of(*index));
  CalibrationPrompts calibration = arguments.calibration;
  SQZ_ASSIGN_OR_RETURN(
      calibration.prompts,
      encode_prompts(*tokenizer, prompts, index->metadata().model, index->metadata().tokens, chat));
  SQZ_RETURN_IF_ERROR(check_output(output, arguments.force || in_place,
                                   with_model_files(arguments.prompts, arguments.model)));
  SQZ_ASSIGN_OR_RETURN(
      const auto runner,
      Runner::load(arguments.model, runner_options(arguments.run_dtype, context.options)));

  Progress progress(context.progress_style(), "calibrate");
  const RecalibrateOptions options{arguments.force || in_place, context.options.threads};
  SQZ_ASSIGN_OR_RETURN(const uint64_t bytes,
                       calibrate_with_prompts(*runner, *index, calibration, output, options,
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

struct CompressArguments {
  std::string index, output;
  bool force = false;
  CompressOptions options;
};

Status run_compress(const CompressArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  CompressOptions options = arguments.options;
  options.rows = RowKind::kQ8;
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force, {arguments.index}));
  Progress progress(context.progress_style(), "compress");
  SQZ_ASSIGN_OR_RETURN(
      const CompressReport report,
      compress_index(Env::posix(), *index, options, arguments.output, arguments.force,
                     context.options.threads, [&](double done) { progress.update(done); }));
  progress.finish();
  context.output.result({{"path", arguments.output},
                         {"bytes", report.bytes},
                         {"bytes_before", report.bytes_before},
                         {"rows", rows_name(options.rows)}});
  return {};
}

struct PruneArguments {
  std::string index, output, selector, layers;
  double budget = 0.125;
  bool force = false;
};

Result<SelectorKind> kind_of(const std::string& name) {
  for (const SelectorKind kind :
       {SelectorKind::kStream, SelectorKind::kWindow, SelectorKind::kH2o}) {
    if (name == selector_name(kind)) return kind;
  }
  return Status(Code::kInvalidArgument,
                concat("--selector: found ", name, ", expected window, stream or h2o"));
}

Status run_prune(const PruneArguments& arguments, const ToolContext& context) {
  SelectionRequest policy;
  SQZ_ASSIGN_OR_RETURN(policy.selector, kind_of(arguments.selector));
  policy.budget = arguments.budget;
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(arguments.index));
  std::vector<double> scales;
  policy.uniform_layers = arguments.layers == kUniformLayers;
  if (!arguments.layers.empty() && !policy.uniform_layers) {
    SQZ_ASSIGN_OR_RETURN(const LayerBudgets budgets,
                         read_layer_budgets(arguments.layers, index->metadata().model));
    scales.assign(budgets.budget.begin(), budgets.budget.end());
    policy.layer_scales = scales;
  }
  SQZ_RETURN_IF_ERROR(
      check_output(arguments.output, arguments.force, {arguments.index, arguments.layers}));
  SQZ_ASSIGN_OR_RETURN(const PruneReport report,
                       prune_index(Env::posix(), index, policy, arguments.output, arguments.force,
                                   context.options.threads));
  context.output.result({{"path", arguments.output},
                         {"bytes", report.bytes},
                         {"bytes_before", index->file_bytes()},
                         {"selector", arguments.selector},
                         {"budget", report.budget},
                         {"keep", report.keep},
                         {"kept", report.kept}});
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
  add_files(*app, arguments->index, arguments->output, arguments->force);
  app->add_option("-m,--model", arguments->model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app->add_option("--prompts", arguments->prompts,
                  "Prompts, one a line; in F.jsonl objects with \"prompt\". May be repeated")
      ->required()
      ->take_all();
  app->add_option("--answer-tokens", arguments->calibration.answer_tokens,
                  "Tokens of each greedy answer that count beside the prompt")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  add_run_dtype_option(*app, arguments->run_dtype);
}

void add_compress_command(Tool& tool) {
  const auto arguments = std::make_shared<CompressArguments>();
  CLI::App* app = tool.command(
      "compress", "Store keys and values of an index in 8 bits.",
      "The result is byte for byte what `sqz-index build` writes with the same options. It needs\n"
      "no model. Sink, tail and dense layers stay in 16 bits.\n"
      "\n"
      "Result: path, bytes, bytes_before, rows.\n"
      "\n"
      "Example:\n"
      "  sqz-index compress book.sqz -o small.sqz --rows q8\n",
      [arguments](const ToolContext& context) { return run_compress(*arguments, context); });
  add_files(*app, arguments->index, arguments->output, arguments->force)->required();
  app->add_option("--rows", "Codes of 8 bits in place of 16-bit keys and values: q8")
      ->check(CLI::IsMember({"q8"}));
  add_code_options(*app, arguments->options);
}

void add_prune_command(Tool& tool) {
  const auto arguments = std::make_shared<PruneArguments>();
  CLI::App* app = tool.command(
      "prune", "Leave out of an index the keys that a policy never reads.",
      "For selectors whose choice no question changes. The result serves that selector at that\n"
      "budget alone, with the same answers to the bit, and takes little more than the budget of\n"
      "the room, on the disk and in memory.\n\n"
      "Result: path, bytes, bytes_before, selector, budget, keep, kept[] (keys a KV head, by\n"
      "layer).\n"
      "\n"
      "Examples:\n"
      "  sqz-index prune book.sqz --selector h2o --budget 0.1 -o small.sqz\n"
      "  sqz-index prune book.sqz --selector window --layers layers.json -o small.sqz\n",
      [arguments](const ToolContext& context) { return run_prune(*arguments, context); });
  add_files(*app, arguments->index, arguments->output, arguments->force)->required();
  app->add_option("--selector", arguments->selector, "window, stream or h2o")->required();
  app->add_option("--budget", arguments->budget,
                  "Fraction of the fixed context's bytes that are read and kept")
      ->check(real_number(1e-6, 1.0))
      ->capture_default_str();
  app->add_option("--layers", arguments->layers,
                  "Spread the budget over the layers by a profile of sqz-profile-layers; uniform = "
                  "all alike (default: what the index embeds)")
      ->type_name("L.json");
}

}  // namespace sqz
