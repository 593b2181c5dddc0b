#include "tools/sqz_eval/eval.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "formats/base/stopwatch.h"
#include "tools/common/model_options.h"
#include "tools/common/texts.h"
#include "tools/sqz_eval/judge.h"

namespace sqz::eval {
namespace {

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
                       load_runner(arguments.model, runner_options(arguments.run_dtype, common)));
  SQZ_RETURN_IF_ERROR(check_numbers(arguments, out.model.description()));
  for (Setting& setting : out.settings) {
    SQZ_RETURN_IF_ERROR(load_layers(setting.options, out.model.description()));
  }
  SQZ_ASSIGN_OR_RETURN(out.haystacks, read_haystacks(arguments.texts, *out.model.tokenizer));
  out.build.engine = arguments.engine;
  out.build.level_fractions = arguments.level_fractions;
  out.build.calibrate_keys = needs_selector(out.settings, "ideal");
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
                                                         {"rows", "rows"},
                                                         {"key_codes", "codes"},
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

}  // namespace

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

}  // namespace sqz::eval
