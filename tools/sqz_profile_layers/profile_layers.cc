#include "tools/sqz_profile_layers/profile_layers.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "formats/checkpoint.h"
#include "formats/layers_file.h"
#include "libindex/layer_budgets.h"
#include "tools/common/layers_table.h"
#include "tools/common/load_runner.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/signals.h"
#include "tools/common/texts.h"
#include "training/profile.h"

namespace sqz {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int64_t kDefaultWindow = 16384;

struct Plan {
  ProfileOptions options;  // without progress
  BudgetRequest request;
};

// Everything that can be refused before the model runs is.
Result<Plan> plan(const ProfileArguments& arguments, const ModelDescription& model) {
  if (model.layers < kLayerGroups) {
    return Status(Code::kUnsupported,
                  bad_field(arguments.model, "layers", concat(model.layers),
                            concat("at least ", kLayerGroups, ", one a group")));
  }
  Plan out;
  out.options.window =
      arguments.tokens > 0 ? arguments.tokens : std::min(kDefaultWindow, model.max_positions);
  out.options.windows = arguments.windows;
  if (out.options.window > model.max_positions) {
    return Status(Code::kInvalidArgument,
                  concat("--tokens: found ", out.options.window, ", expected at most ",
                         model.max_positions, ", the positions of ", arguments.model));
  }
  out.request.context = arguments.context > 0 ? arguments.context : out.options.window;
  if (!(arguments.budget > 0 && arguments.budget <= 1)) {
    return Status(Code::kInvalidArgument,
                  concat("--budget: found ", arguments.budget, ", expected a number in (0, 1]"));
  }
  out.request.budget = std::llround(arguments.budget * static_cast<double>(out.request.context));
  out.request.p = arguments.p;
  constexpr std::array<int, kLayerGroups> kOneOfEach = {0, 1, 2};
  SQZ_RETURN_IF_ERROR(layer_budgets(kOneOfEach, out.request).status());
  return out;
}

Result<std::vector<ProfileText>> read_texts(const ProfileArguments& arguments,
                                            const ProfileOptions& options,
                                            const Tokenizer& tokenizer,
                                            const ModelDescription& model) {
  SQZ_ASSIGN_OR_RETURN(const auto documents, find_documents(arguments.texts));
  std::vector<ProfileText> out;
  for (const Document& document : documents) {
    ProfileText text;
    text.name = document.path;
    SQZ_ASSIGN_OR_RETURN(
        text.tokens, encode_documents(tokenizer, {&document, 1}, options.windows * options.window));
    for (size_t first = 0; first < text.tokens.size();
         first += static_cast<size_t>(options.window)) {
      const auto rest = std::span<const int32_t>(text.tokens).subspan(first);
      SQZ_RETURN_IF_ERROR(
          check_tokens(rest.first(std::min(rest.size(), static_cast<size_t>(options.window))),
                       model, "the tokenizer of " + arguments.model, arguments.model));
    }
    out.push_back(std::move(text));
  }
  return out;
}

}  // namespace

void add_profile_options(CLI::App& app, ProfileArguments& arguments) {
  app.add_option("TEXT", arguments.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input")
      ->required();
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-o,--output", arguments.output, "The layer profile (.sqz) to write")->required();
  app.add_flag("--force", arguments.force, "Replace an existing output");
  app.add_option("--tokens", arguments.tokens,
                 "Tokens of a window, which is one dense pass (default: the model's positions, at "
                 "most 16384)")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  app.add_option("--windows", arguments.windows, "Windows of each text; 0 = all of it")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--budget", arguments.budget,
                 "Fraction of the context that a layer reads, if all "
                 "read the same")
      ->capture_default_str();
  app.add_option("--p", arguments.p,
                 "Share of it that layers of group 2 keep, in (0, 1]; 1 = all layers alike")
      ->capture_default_str();
  app.add_option("--context", arguments.context,
                 "Tokens of the context that budgets are for (default: those of a window)")
      ->check(CLI::Range(int64_t{1}, int64_t{UINT32_MAX}))
      ->type_name("N");
  add_run_dtype_option(app, arguments.run_dtype);
}

Status run_profile(const ProfileArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(arguments.model));
  const ModelDescription& model = checkpoint->config().description;
  SQZ_ASSIGN_OR_RETURN(Plan planned, plan(arguments, model));
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force));
  SQZ_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto texts, read_texts(arguments, planned.options, *tokenizer, model));
  const auto start = Clock::now();
  SQZ_ASSIGN_OR_RETURN(
      const auto runner,
      load_runner(arguments.model, runner_options(arguments.run_dtype, context.options)));
  const double load_seconds = seconds_since(start);

  Progress progress(context.progress_style(), "profile");
  planned.options.progress = [&](double done) {
    progress.update(done);
    return check_stop();
  };
  SQZ_ASSIGN_OR_RETURN(const LayerProfile profile, profile_layers(*runner, texts, planned.options));
  progress.finish();
  const double profile_seconds = seconds_since(start) - load_seconds;

  const auto groups = group_layers(profile.cosine);
  if (!groups.ok()) {  // the numbers are the model's, not the user's
    return {Code::kUnsupported, concat(arguments.model, ": ", groups.status().message())};
  }
  LayersFile layers;
  layers.model = model;
  layers.tokenizer_hash = tokenizer->hash();
  layers.texts = std::ssize(texts);
  layers.windows = profile.windows;
  layers.window = planned.options.window;
  layers.tokens = profile.tokens;
  layers.context = planned.request.context;
  layers.uniform_budget = planned.request.budget;
  layers.p = planned.request.p;
  layers.cosine = profile.cosine;
  layers.cosine_error = profile.cosine_error;
  layers.group.assign(groups->begin(), groups->end());
  SQZ_ASSIGN_OR_RETURN(layers.budget, layer_budgets(*groups, planned.request));

  protect_output(arguments.output);
  SQZ_ASSIGN_OR_RETURN(const uint64_t bytes,
                       write_layers_file(Env::posix(), arguments.output, arguments.force, layers));
  SQZ_ASSIGN_OR_RETURN(layers, read_layers_file(arguments.output));
  Json result = layers_json(layers);
  result["path"] = arguments.output;
  result["bytes"] = bytes;
  result["seconds"] = {{"load", load_seconds}, {"profile", profile_seconds}};
  Rows rows = {{"layers", arguments.output}};
  for (auto& row : layers_rows(layers)) rows.push_back(std::move(row));
  rows.emplace_back("seconds", concat(seconds_text(load_seconds), " to load, ",
                                      seconds_text(profile_seconds), " to profile"));
  context.output.text(layers_table(layers) + "\n");
  context.output.result(result, rows);
  return {};
}

}  // namespace sqz
