// The work of sqz-eval: options, passes, views, rows.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "formats/base/stopwatch.h"
#include "tools/common/mains.h"
#include "tools/common/model_options.h"
#include "tools/common/texts.h"
#include "tools/sqz_eval/judge.h"

namespace sqz::eval {
namespace {

constexpr const char* kDescription =
    "Measures what a selector costs: answers, loss, attention outputs and bytes read, against "
    "dense attention.";

constexpr const char* kHelp =
    R"(Trials
  A context is a slice of a text, from a random line on (--seed), of exactly --tokens tokens,
  with a fact (needle) planted at a line's end, at a depth between sink and tail:
    "One of the special magic numbers for harbour is: 1234567."
    needle1  the question follows the context; the answer is generated greedily and counts only
             if it is the whole number; a trial a context
    loss     mean loss (nats) of the --continuation tokens that follow the context; a trial is
             128 of them
    error    ||sparse - dense|| / ||dense|| of the attention output (the fixed context merged
             with the exact attention to the tokens since), mean over layers, query heads and
             tokens, all other layers dense; of the text that follows and of the questions
    recall   part of the dense attention to the fixed context that is on keys that were read
  Contexts that differ only in their facts share a dense pass of the model: up to --share needles
  are planted in one text, and each trial's index leaves out the tokens of the facts that belong
  to others (at most 2 % of the context). --share 1 gives each trial a pass of its own. All
  selectors and budgets are served from the same indexes.

Rows
  One a (task, setting). asked, delivered: fraction of the context's bytes,
  metadata included; lowest, highest: delivered to one question or text; keys: fraction of the
  clustered keys that was read; +- standard error (binomial, or over trials); to dense: the
  difference, trial by trial; agree: right answers of those that are right with dense attention.

Result: rows[] with task, on, tokens, the setting, trials, value, stderr, difference,
agreement, budget, keep, dense_fallback; model, fingerprint, seed, seconds.
Events `pass` have the rows so far.

Examples:
  sqz-eval --model MODEL --text book.txt --tokens 8000 --trials 24
  sqz-eval --model MODEL --text a.txt --text b.txt --tokens 31000 \
    --selector squeezed --levels 1,2 --rule threshold,budget --budget 0.125,0.25 --json
)";

struct EvalArguments {
  std::string model;
  std::vector<std::string> texts;
  TrialOptions trials;  // the seed is filled in by run_eval()
  SettingOptions settings;
  std::string run_dtype = "f32";
  std::string engine = "auto";  // of the clustering
  std::vector<double> level_fractions = BuildOptions().level_fractions;
  std::string qmodel;  // F.sqz, for the selector saap
};

constexpr int64_t kQuestionTokens = 128;  // more than any question and its answer have
constexpr double kPassShare = 0.6;        // of a pass's time before its questions, roughly

struct Work {
  EvalModel model;
  std::vector<TokenText> haystacks;
  std::vector<Setting> settings;
  BuildOptions build;
  std::unique_ptr<QmodelFile> qmodel;  // `build` points to it
};

Result<std::vector<TokenText>> read_haystacks(const std::vector<std::string>& texts,
                                              const Tokenizer& tokenizer) {
  SQZ_ASSIGN_OR_RETURN(const auto documents, find_documents(texts));
  std::vector<TokenText> out;
  for (const std::string& document : documents) {
    TokenText haystack{document, {}};
    SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(Env::posix(), document));
    const Status status = tokenizer.encode(text, false, haystack.tokens);
    if (!status.ok()) return Status(Code::kCorrupt, concat(document, ": ", status.message()));
    out.push_back(std::move(haystack));
  }
  return out;
}

Status load_qmodel(const std::string& path, Work& work) {
  SQZ_ASSIGN_OR_RETURN(QmodelFile qmodel, read_qmodel_file(path));
  SQZ_RETURN_IF_ERROR(check_same_model(qmodel.model, work.model.description(), path));
  work.qmodel = std::make_unique<QmodelFile>(std::move(qmodel));
  work.build.qmodel = work.qmodel.get();
  return {};
}

// Refuses before the first dense pass what the model or every index would refuse after it.
Status check_numbers(const EvalArguments& arguments, const ModelDescription& model) {
  const int dense = arguments.settings.dense_layers.value_or(0);
  if (dense > model.layers) {
    return {Code::kInvalidArgument, concat("--dense-layers: found ", dense, ", expected 0 to ",
                                           model.layers, ", the layers of ", arguments.model)};
  }
  const auto& levels = arguments.settings.levels;
  const int most = *std::max_element(levels.begin(), levels.end());
  if (most <= std::ssize(arguments.level_fractions)) return {};
  return {Code::kInvalidArgument,
          concat("--levels: found ", most, ", expected 0 to ", arguments.level_fractions.size(),
                 ", the levels of --level-fractions")};
}

Result<Work> prepare(const EvalArguments& arguments, const CommonOptions& common) {
  Work out;
  out.settings = make_settings(arguments.settings);
  if (needs_selector(out.settings, "saap") == arguments.qmodel.empty()) {
    return Status(Code::kInvalidArgument,
                  "--selector saap and --qmodel F.sqz go together: found one without the other");
  }
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SQZ_ASSIGN_OR_RETURN(out.model.tokenizer, Tokenizer::load(arguments.model));
  SQZ_ASSIGN_OR_RETURN(out.model.runner,
                       Runner::load(arguments.model, runner_options(arguments.run_dtype, common)));
  SQZ_RETURN_IF_ERROR(check_numbers(arguments, out.model.description()));
  for (Setting& setting : out.settings) {
    SQZ_RETURN_IF_ERROR(load_layers(setting.options, out.model.description()));
  }
  SQZ_ASSIGN_OR_RETURN(out.haystacks, read_haystacks(arguments.texts, *out.model.tokenizer));
  out.build.engine = arguments.engine;
  out.build.level_fractions = arguments.level_fractions;
  out.build.heavy_hitters = needs_selector(out.settings, "h2o");
  out.build.seed = common.seed;
  out.build.threads = common.threads;
  out.build.gpu = common.gpu().value_or(0);
  if (!arguments.qmodel.empty()) {
    SQZ_RETURN_IF_ERROR(load_qmodel(arguments.qmodel, out));
  }
  return out;
}

Result<TrialOptions> trial_options(const EvalArguments& arguments, const Work& work,
                                   uint64_t seed) {
  const ModelDescription& model = work.model.description();
  TrialOptions out = arguments.trials;
  out.sink = work.build.sink;
  out.tail = work.build.tail;
  out.seed = seed;
  // A window counts tokens, and RoPE is undone by their positions: none may be left out.
  const bool windows = std::any_of(model.sliding_window.begin(), model.sliding_window.end(),
                                   [](int64_t window) { return window > 0; });
  if (windows || work.qmodel != nullptr) out.share = 1;
  const int64_t after = std::max(out.continuation, kQuestionTokens);
  if (out.tokens + after <= model.max_positions) return out;
  return Status(Code::kInvalidArgument,
                concat("--tokens ", out.tokens, ": with the ", after, " tokens that follow, ",
                       arguments.model, " would need ", out.tokens + after, " positions, but has ",
                       model.max_positions, "; pass fewer --tokens or --continuation"));
}

// Every slice is cut before the first dense pass: a text that is too short is refused at once.
Result<std::vector<Pass>> make_passes(const TrialOptions& options, const Work& work) {
  const std::vector<PassShape> shapes = plan_passes(options);
  std::vector<Pass> out;
  for (size_t i = 0; i < shapes.size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(Pass pass,
                         make_pass(*work.model.tokenizer, work.haystacks[i % work.haystacks.size()],
                                   shapes[i], options, static_cast<int64_t>(i)));
    SQZ_RETURN_IF_ERROR(check_tokens(pass.ids, work.model.description(), pass.source, "the model"));
    out.push_back(std::move(pass));
  }
  return out;
}

// One pass: its indexes, then its views. `progress` gets 0 .. 1.
Status run_pass(const Pass& pass, Work& work, Judge& judge,
                const std::function<void(double)>& progress) {
  const Stopwatch watch;
  PassIndexes indexes;
  SQZ_RETURN_IF_ERROR(indexes.make(work.model, pass, index_kinds(work.settings), work.build,
                                   [&](double done) { progress(done * kPassShare); }));
  const double building = watch.seconds();
  const auto views = static_cast<double>(pass.views.size());
  for (size_t view = 0; view < pass.views.size(); ++view) {
    SQZ_RETURN_IF_ERROR(judge.judge(pass, view, indexes));
    progress(kPassShare + (1 - kPassShare) * static_cast<double>(view + 1) / views);
  }
  spdlog::debug("{}: {} tokens, {} contexts: built in {:.1f} s, measured in {:.1f} s", pass.source,
                pass.ids.size(), pass.views.size(), building, watch.seconds() - building);
  return {};
}

// Aligned columns, a line a row, a header first. Fractions have four digits.
std::string table_text(const std::vector<JsonMembers>& rows) {
  using Line = std::vector<std::string>;
  const std::pair<const char*, const char*> columns[] = {{"task", "task"},
                                                         {"on", "on"},
                                                         {"selector", "selector"},
                                                         {"documents", "documents"},
                                                         {"rows", "rows"},
                                                         {"levels", "levels"},
                                                         {"rule", "rule"},
                                                         {"layers", "layers"},
                                                         {"budget.asked", "asked"},
                                                         {"budget.delivered", "delivered"},
                                                         {"budget.lowest", "lowest"},
                                                         {"budget.highest", "highest"},
                                                         {"keep.delivered", "keys"},
                                                         {"value", "value"},
                                                         {"stderr", "+-"},
                                                         {"difference.value", "to dense"},
                                                         {"difference.stderr", "+-"},
                                                         {"agreement.both", "agree"},
                                                         {"agreement.dense", "of"},
                                                         {"trials", "n"}};
  std::vector<Line> lines(1);
  for (const auto& [field, title] : columns) lines[0].push_back(title);
  for (const JsonMembers& row : rows) {
    const auto found = rows_of(row);
    const std::map<std::string, std::string> fields(found.begin(), found.end());
    Line& line = lines.emplace_back();
    for (const auto& [field, title] : columns) {
      const auto at = fields.find(field);
      const std::string text = at == fields.end() ? "-" : at->second;
      double number = 0;
      const bool fraction =
          text.find('.') != std::string::npos && CLI::detail::lexical_cast(text, number);
      line.push_back(fraction ? fixed_text(number, 4) : text);
    }
  }
  return columns_text(lines, 8);
}

void add_trial_options(CLI::App& app, EvalArguments& arguments) {
  const HelpSection section(app, "Trials");
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option(
         "--text", arguments.texts,
         "Texts to take slices of, each longer than these: files or folders; passes take turns")
      ->required();
  app.add_option("--tokens", arguments.trials.tokens, "Length of the fixed context")
      ->required()
      ->check(whole_number(1));
  app.add_option("--task", arguments.trials.tasks, "What to measure")
      ->delimiter(',')
      ->check(CLI::IsMember({kNeedle1, kLoss, kError, kRecall}));
  app.add_option("--trials", arguments.trials.trials, "Trials of each task")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--share", arguments.trials.share, "Most trials that share a dense pass")
      ->check(CLI::Range(int64_t{1}, kMostFacts));
  app.add_option("--continuation", arguments.trials.continuation,
                 "Tokens after the context whose loss is measured")
      ->check(CLI::Range(int64_t{kBlockTokens}, int64_t{65536}));
  app.add_option("--calibrate-prompts", arguments.trials.calibration,
                 "Calibrate with the questions of N needles more, planted for that in every "
                 "context; 0: with its tail")
      ->check(CLI::Range(int64_t{0}, kMostCalibrationFacts))
      ->type_name("N");
}

void add_setting_options(CLI::App& app, SettingOptions& settings) {
  const HelpSection section(app, "Selection (all combinations are measured)");
  app.add_option("--selector", settings.selectors, "Selectors; dense is always among them")
      ->delimiter(',')
      ->check(CLI::IsMember(selector_names()));
  app.add_option("--budget", settings.budgets, "Fractions of the fixed context's bytes to read")
      ->delimiter(',')
      ->check(real_number(1e-6, 1.0));
  app.add_option("--levels", settings.levels, "Levels of the tree to use; 0 = all, 1 = flat lookup")
      ->delimiter(',')
      ->check(CLI::Range(0, 16));
  app.add_option("--rule", settings.rules, "budget, threshold (of squeezed)")
      ->delimiter(',')
      ->check(CLI::IsMember({"budget", "threshold"}));
  app.add_option("--rows", settings.rows,
                 "Rows of the index: bf16, q8 (of selectors that read clusters)")
      ->delimiter(',')
      ->check(CLI::IsMember({"bf16", "q8"}));
  app.add_option(
         "--layers", settings.layers,
         "Profiles (L.json) of sqz-profile-layers that spread the budget over the layers, and "
         "uniform for all alike")
      ->delimiter(',');
  app.add_option("--compose", settings.compose,
                 "Beside the whole context, so many documents of it that were made apart, put one "
                 "behind the other (needle1 and loss)")
      ->delimiter(',')
      ->check(CLI::Range(2, SQZ_MOST_CONTEXTS));
  app.add_option("--dense-layers", settings.dense_layers,
                 "First layers that are read whole (default: what each selector wants, quest 2)")
      ->check(whole_number(0));
  app.add_option("--block", settings.block, "Prompt tokens that share a selection; 0 = all of them")
      ->check(whole_number(0));
}

void add_eval_options(CLI::App& app, EvalArguments& arguments) {
  add_trial_options(app, arguments);
  add_setting_options(app, arguments.settings);
  const HelpSection section(app, "Work");
  app.add_option("--run-dtype", arguments.run_dtype, "What the model computes in")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--qmodel", arguments.qmodel,
                 "Query classifier (.sqz) of this model, for --selector saap");
  app.add_option("--engine", arguments.engine, "Engine that clusters the indexes")
      ->check(CLI::IsMember({"auto", "faiss", "cuda"}));
  app.add_option("--level-fractions", arguments.level_fractions,
                 "Clusters a token of the indexes, coarse to fine (default: 0.01,0.05)")
      ->delimiter(',')
      ->check(real_number(1e-9, 1.0));
}

Status run_eval(const EvalArguments& arguments, const ToolContext& context) {
  const Stopwatch watch;
  SQZ_ASSIGN_OR_RETURN(Work work, prepare(arguments, context.options));
  SQZ_ASSIGN_OR_RETURN(const TrialOptions options,
                       trial_options(arguments, work, context.options.seed));
  SQZ_ASSIGN_OR_RETURN(const auto passes, make_passes(options, work));
  Judge judge(work.model, options, work.settings, context.options.threads, context.options.gpu());
  Progress progress(context.progress_style(), "eval");
  for (size_t i = 0; i < passes.size(); ++i) {
    SQZ_RETURN_IF_ERROR(run_pass(passes[i], work, judge, [&](double part) {
      progress.update((static_cast<double>(i) + part) / static_cast<double>(passes.size()));
    }));
    context.output.event(
        "pass",
        {{"source", passes[i].source}, {"tokens", passes[i].ids.size()}, {"rows", judge.rows()}});
  }
  progress.finish();
  context.output.text(table_text(judge.rows()));
  if (!context.output.json()) return {};
  context.output.result({{"rows", judge.rows()},
                         {"model", arguments.model},
                         {"fingerprint", fingerprint(work.model.description())},
                         {"seed", context.options.seed},
                         {"seconds", watch.seconds()}});
  return {};
}

}  // namespace
}  // namespace sqz::eval

int sqz::eval_main(int argc, char** argv) {
  Tool tool("sqz-eval", eval::kDescription, eval::kHelp);
  eval::EvalArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const ToolContext& context) { return eval::run_eval(arguments, context); });
  eval::add_eval_options(*app, arguments);
  return tool.run(argc, argv, true);
}
