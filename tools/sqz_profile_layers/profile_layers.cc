// sqz-profile-layers: cosines of a model's layers, their groups, and the budgets that follow.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "formats/base/stopwatch.h"
#include "formats/base/temporaries.h"
#include "formats/checkpoint.h"
#include "formats/layers_file.h"
#include "libindex/builder.h"
#include "tools/common/mains.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/texts.h"
#include "tools/common/tool.h"
#include "tools/sqz_profile_layers/trials.h"
#include "training/profile.h"

namespace sqz {
namespace {

struct ProfileArguments {
  std::string model, output;
  std::vector<std::string> texts;
  bool force = false;
  int64_t tokens = 0;   // of a window; 0: as many as the model has positions, up to 16384
  int64_t windows = 1;  // of each text; 0: all of it
  int64_t context = 0;  // tokens that the budgets are for; 0: those of a window
  double budget = 0.125;
  double p = 0.35;  // the paper recommends 0.3 to 0.4
  std::string allocate = kAllocationGroups;
  std::string selector = "squeezed";  // whose losses are measured
  int64_t held_out = 1024;            // tokens behind each window
  int64_t block = 0;                  // of them that share a selection; 0: all
  std::string run_dtype;

  bool measures() const { return allocate == kAllocationMeasured; }
};

constexpr int64_t kDefaultWindow = 16384;
constexpr double kProfileShare = 0.5;  // of the time, roughly, where losses are measured

struct Plan {
  ProfileOptions options;  // without progress and consumer
  BudgetRequest request;
  int64_t behind = 0;  // tokens behind each window that are needed
};

// Everything that can be refused before the model runs is.
Result<Plan> make_plan(const ProfileArguments& arguments, const ModelDescription& model) {
  if (model.layers < kLayerGroups) {
    return Status(Code::kUnsupported,
                  bad_field(arguments.model, "layers", concat(model.layers),
                            concat("at least ", kLayerGroups, ", one a group")));
  }
  Plan out;
  out.behind = arguments.measures() ? arguments.held_out + 1 : 0;
  out.options.window = arguments.tokens > 0
                           ? arguments.tokens
                           : std::min(kDefaultWindow, model.max_positions - out.behind);
  out.options.windows = arguments.windows;
  const int64_t left = model.max_positions - 2;
  if (arguments.measures() && arguments.held_out > left) {
    return Status(Code::kInvalidArgument,
                  concat("--held-out: found ", arguments.held_out, ", expected at most ", left,
                         ", what a window leaves of the positions of ", arguments.model));
  }
  if (out.options.window + out.behind > model.max_positions) {
    return Status(Code::kInvalidArgument,
                  concat("--tokens: found ", out.options.window, ", expected at most ",
                         model.max_positions - out.behind, ", the positions of ", arguments.model,
                         out.behind > 0 ? " less what is held out" : ""));
  }
  out.request.context = arguments.context > 0 ? arguments.context : out.options.window;
  out.request.budget = std::llround(arguments.budget * static_cast<double>(out.request.context));
  out.request.p = arguments.measures() ? 1 : arguments.p;
  constexpr std::array<int, kLayerGroups> kOneOfEach = {0, 1, 2};
  SQZ_RETURN_IF_ERROR(layer_budgets(kOneOfEach, out.request).status());
  return out;
}

Status check_lengths(const Plan& plan, const std::vector<TokenText>& texts) {
  const int64_t needed = plan.options.window + plan.behind;
  for (const TokenText& text : texts) {
    if (plan.behind == 0 || std::ssize(text.tokens) >= needed) continue;
    return {Code::kCorrupt,
            bad_field(text.name, "text", concat(text.tokens.size(), " tokens"),
                      concat("at least ", needed, ": a window of ", plan.options.window, " and ",
                             plan.behind, " that are held out; pass fewer --tokens"))};
  }
  return {};
}

// Windows of a text that have held-out tokens behind them: there is one at least.
int64_t trial_windows(const Plan& plan, const TokenText& text) {
  const int64_t windows = (std::ssize(text.tokens) - plan.behind) / plan.options.window;
  return plan.options.windows == 0 ? windows : std::min(windows, plan.options.windows);
}

BuildOptions trial_options(const ProfileArguments& arguments, const CommonOptions& common) {
  BuildOptions out;
  out.threads = common.threads;
  out.seed = common.seed;
  out.heavy_hitters = arguments.selector == "h2o";
  // The other selectors read the same from pages, which take no k-means.
  if (arguments.selector != "squeezed") out.partition = Partition::kPages;
  return out;
}

SelectorOptions trial_selector(const ProfileArguments& arguments) {
  SelectorOptions out;
  out.selector = arguments.selector;
  out.rule = "budget";
  out.block = arguments.block;
  out.budget = arguments.budget;
  return out;
}

// Indexes for trials, of the windows that a profile runs over. The passes of the profile build
// them. The files are beside `output`, and are removed at the end. consume() is the profile's
// consumer.
class TrialIndexes {
 public:
  TrialIndexes(std::string output, const ModelDescription& model, std::string tokenizer_hash,
               BuildOptions options)
      : output_(std::move(output)),
        model_(model),
        tokenizer_hash_(std::move(tokenizer_hash)),
        options_(std::move(options)) {}
  TrialIndexes(const TrialIndexes&) = delete;
  TrialIndexes& operator=(const TrialIndexes&) = delete;

  // Adds the window of the next pass and returns the path of its index. `tokens` is borrowed.
  std::string add(std::span<const int32_t> tokens) {
    windows_.push_back({TemporaryName(unique_name(output_ + ".tmp.trial.")), tokens});
    return windows_.back().name.path();
  }

  Status consume(int64_t window, const LayerCapture& layer) {
    const Window& own = windows_[static_cast<size_t>(window)];
    if (layer.layer == 0) {
      SQZ_ASSIGN_OR_RETURN(
          builder_, IndexBuilder::create(Env::posix(), own.name.path(), false, model_, own.tokens,
                                         tokenizer_hash_, options_));
    }
    SQZ_RETURN_IF_ERROR(builder_->add_layer(
        layer.layer, {layer.keys, layer.values, layer.queries, nullptr, layer.attention}));
    if (layer.layer + 1 < model_.layers) return {};
    const Status finished = builder_->finish().status();
    builder_.reset();
    return finished;
  }

 private:
  struct Window {
    TemporaryName name;
    std::span<const int32_t> tokens;
  };

  std::string output_;
  const ModelDescription& model_;
  std::string tokenizer_hash_;
  BuildOptions options_;
  std::vector<Window> windows_;
  std::unique_ptr<IndexBuilder> builder_;  // of the window at hand
};

struct Outcome {
  LayersFile profile;
  std::vector<int> groups;
  Comparison comparison;  // empty if nothing was measured
  double profile_seconds = 0, measure_seconds = 0;
};

Result<std::vector<int>> groups_of(const LayersFile& profile, const std::string& model) {
  auto groups = group_layers(profile.cosine);
  if (groups.ok()) return groups;  // the numbers are the model's, not the user's
  return Status(Code::kUnsupported, concat(model, ": ", groups.status().message()));
}

Result<Outcome> measure(const ProfileArguments& arguments, Plan& plan,
                        const std::vector<TokenText>& texts, const std::string& tokenizer_hash,
                        Runner& runner, const ToolContext& context) {
  const ModelDescription& model = runner.config().description;
  TrialIndexes indexes(arguments.output, model, tokenizer_hash,
                       trial_options(arguments, context.options));
  Trials trials(runner, trial_selector(arguments), context.options.threads);
  std::vector<TokenText> windows;
  for (const TokenText& text : texts) {
    if (!arguments.measures()) {
      windows.push_back({text.name, text.tokens});
      continue;
    }
    const int64_t count = trial_windows(plan, text), length = plan.options.window;
    const std::span<const int32_t> all(text.tokens);
    for (int64_t i = 0; i < count; ++i) {
      const auto rest = all.subspan(static_cast<size_t>(i * length));
      const auto window = rest.first(static_cast<size_t>(length));
      const auto behind = rest.subspan(window.size(), static_cast<size_t>(plan.behind));
      trials.add({indexes.add(window), {behind.begin(), behind.end()}});
    }
    windows.push_back({text.name, {all.begin(), all.begin() + count * length}});
  }
  Progress progress(context.progress_style(), "profile");
  const double share = arguments.measures() ? kProfileShare : 1;
  plan.options.progress = [&](double done) { progress.update(share * done); };
  if (arguments.measures()) {
    const BuildOptions build = trial_options(arguments, context.options);
    plan.options.attention = build.heavy_hitters;
    plan.options.tail_queries = build.tail;
    plan.options.consumer = [&](int64_t window, const LayerCapture& layer) {
      return indexes.consume(window, layer);
    };
  }
  Outcome out;
  const Stopwatch watch;
  SQZ_ASSIGN_OR_RETURN(out.profile, profile_layers(runner, windows, plan.options));
  out.profile_seconds = watch.seconds();
  SQZ_ASSIGN_OR_RETURN(out.groups, groups_of(out.profile, arguments.model));
  if (arguments.measures()) {
    SQZ_ASSIGN_OR_RETURN(out.comparison,
                         compare_allocations(trials, plan.request, [&](double done) {
                           progress.update(share + (1 - share) * done);
                         }));
    out.measure_seconds = watch.seconds() - out.profile_seconds;
  }
  progress.finish();
  return out;
}

JsonText measured_json(const ProfileArguments& arguments, const Comparison& comparison) {
  return {{"selector", arguments.selector},
          {"budget", arguments.budget},
          {"block", arguments.block},
          {"dense_loss", comparison.dense_loss},
          {"allocations", comparison_json(comparison)}};
}

// With the budgets that follow from the groups, or the best of those that were measured.
Result<LayersFile> layers_file(const ProfileArguments& arguments, const Plan& plan,
                               const Outcome& outcome) {
  LayersFile out = outcome.profile;
  out.producer = producer_name();
  out.context = plan.request.context;
  out.uniform_budget = plan.request.budget;
  out.group.assign(outcome.groups.begin(), outcome.groups.end());
  out.allocation = arguments.allocate;
  if (arguments.measures()) {
    out.measured = measured_json(arguments, outcome.comparison);
    out.budget = outcome.comparison.best().budget;
  } else {
    out.p = plan.request.p;
    SQZ_ASSIGN_OR_RETURN(out.budget, layer_budgets(outcome.groups, plan.request));
  }
  return out;
}

void add_measure_options(CLI::App& app, ProfileArguments& arguments) {
  const HelpSection section(app, "Measuring on held-out text");
  app.add_option("--allocate", arguments.allocate,
                 "groups (the paper's), or measured: by the losses that each layer's errors cause")
      ->check(CLI::IsMember({kAllocationGroups, kAllocationMeasured}));
  app.add_option("--selector", arguments.selector, "The selector that reads")
      ->check(CLI::IsMember({"squeezed", "quest", "stream", "window", "h2o"}));
  app.add_option("--block", arguments.block,
                 "Held-out tokens that share a selection; 0 = all of them")
      ->check(whole_number(0));
  app.add_option("--held-out", arguments.held_out,
                 "Tokens behind each window whose loss is measured")
      ->check(CLI::Range(int64_t{128}, int64_t{65536}))
      ->type_name("N");
}

void add_profile_options(CLI::App& app, ProfileArguments& arguments) {
  app.add_option("TEXT", arguments.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input")
      ->required();
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-o,--output", arguments.output, "The layer profile (.json) to write")->required();
  app.add_flag("--force", arguments.force, "Replace an existing output");
  app.add_option("--tokens", arguments.tokens,
                 "Tokens of a window, which is one dense pass (default: the model's positions, at "
                 "most 16384)")
      ->check(whole_number(1))
      ->type_name("N");
  app.add_option("--windows", arguments.windows, "Windows of each text; 0 = all of it")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--budget", arguments.budget,
                 "Fraction of the context that a layer reads, if all read the same")
      ->check(real_number(1e-9, 1.0))
      ->capture_default_str();
  app.add_option(
         "--p", arguments.p,
         "Share of that budget that layers of group 2 keep, with --allocate groups; 1 = all alike")
      ->check(real_number(1e-9, 1.0))
      ->capture_default_str();
  app.add_option("--context", arguments.context,
                 "Tokens of the context that budgets are for (default: those of a window)")
      ->check(CLI::Range(int64_t{1}, int64_t{UINT32_MAX}))
      ->type_name("N");
  add_run_dtype_option(app, arguments.run_dtype);
  add_measure_options(app, arguments);
}

Status run_profile(const ProfileArguments& arguments, const ToolContext& context) {
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(arguments.model));
  const ModelDescription& model = checkpoint->config().description;
  SQZ_ASSIGN_OR_RETURN(Plan plan, make_plan(arguments, model));
  SQZ_ASSIGN_OR_RETURN(const auto documents, find_documents(arguments.texts));
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force,
                                   with_model_files(arguments.texts, arguments.model)));
  SQZ_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(arguments.model));
  const int64_t windows = plan.options.windows;
  SQZ_ASSIGN_OR_RETURN(const auto texts,
                       read_texts(documents, *tokenizer, model, arguments.model,
                                  windows == 0 ? 0 : windows * plan.options.window + plan.behind));
  SQZ_RETURN_IF_ERROR(check_lengths(plan, texts));
  const Stopwatch watch;
  SQZ_ASSIGN_OR_RETURN(
      const auto runner,
      Runner::load(arguments.model, runner_options(arguments.run_dtype, context.options)));
  const double load_seconds = watch.seconds();
  SQZ_ASSIGN_OR_RETURN(const Outcome outcome,
                       measure(arguments, plan, texts, tokenizer->hash(), *runner, context));
  SQZ_ASSIGN_OR_RETURN(LayersFile layers, layers_file(arguments, plan, outcome));
  layers.tokenizer_hash = tokenizer->hash();
  SQZ_RETURN_IF_ERROR(write_layers_file(Env::posix(), arguments.output, arguments.force, layers));
  JsonMembers result = to_json(layers);
  result["path"] = arguments.output;
  result["seconds"] = {{"load", load_seconds},
                       {"profile", outcome.profile_seconds},
                       {"measure", outcome.measure_seconds}};
  context.output.result(result);
  return {};
}

}  // namespace

int profile_layers_main(int argc, char** argv) {
  Tool tool(
      "sqz-profile-layers",
      "Measures how much the attention of each layer changes the hidden state, and shares out a "
      "budget of keys by it.",
      R"(Method
  The cosine of the hidden state before a layer's input norm with the state after the
  attention's residual add, averaged over tokens (SqueezeAttention). Layers are split into
  three groups by their cosines, the best split there is. Layers of group 2, which hardly
  change their input, keep p of the budget; the others share the rest. The sum is that of the
  same budget for every layer, to the key.

  Whether p < 1 helps depends on model, selector and text, and is not measured here: compare
  with sqz-eval --layers uniform,layers.json. --allocate measured deals the budget by what each
  layer's own errors cost on held-out text instead, and keeps every layer alike unless that
  gains more than its standard error.

Refused: models of fewer than three layers, or whose layers have fewer than three different
cosines; texts of fewer than 256 tokens together.

`sqz-index build --layers` puts the budgets into an index, and sqz-generate and sqz-eval take
them by --layers.

Result: the fields of the layer profile (docs/format.md), path, seconds{load, profile, measure}.

Examples:
  sqz-profile-layers --model MODEL book.txt -o layers.json
  sqz-profile-layers --model MODEL texts/ --tokens 16000 --budget 0.1 --p 0.7 -o l.json
  sqz-profile-layers --model MODEL book.txt --allocate measured --selector h2o -o l.json
)");
  ProfileArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const ToolContext& context) { return run_profile(arguments, context); });
  add_profile_options(*app, arguments);
  return tool.run(argc, argv, true);
}

}  // namespace sqz
