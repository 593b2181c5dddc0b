// sqz-train-qmodel: trains a query classifier for a model and writes it as a .sqz of kind `qmodel`.
#include <spdlog/spdlog.h>
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/stopwatch.h"
#include "formats/checkpoint.h"
#include "tools/common/mains.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/qmodel_table.h"
#include "tools/common/texts.h"
#include "tools/common/tool.h"
#include "training/qmodel.h"

namespace sqz {
namespace {

struct TrainQmodelArguments {
  std::string model, output;
  std::vector<std::string> texts, test;
  bool force = false;
  QmodelOptions options;
  std::optional<int64_t> checks;  // none: one every kStepsOfACheck steps, at most kMostChecks
  std::string decay = "cosine";   // or "none"
  std::string dtype = "F32";
  std::string run_dtype;
};

// A check takes as long as some ten steps do on a CPU.
constexpr int64_t kStepsOfACheck = 100, kMostChecks = 20;

std::vector<QmodelRecall> errors_of(const QmodelScores& scores) {
  std::vector<QmodelRecall> out = scores.recall;
  for (size_t i = 0; i < out.size(); ++i) out[i].recall = scores.errors[i];
  return out;
}

JsonText scores_json(const QmodelTrained& trained) {
  std::vector<JsonText> out;
  for (const QmodelScores& row : trained.scores) {
    out.push_back({{"method", row.method},
                   {"queries", row.far_queries ? "far" : "all"},
                   {"recall", recall_json(row.recall)},
                   {"stderr", recall_json(errors_of(row))}});
  }
  return out;
}

void show(const QmodelCheck& found, const Output& output) {
  output.event("check", {{"step", found.step},
                         {"loss", found.loss},
                         {"recall", recall_json(found.recall)},
                         {"far_recall", recall_json(found.far_recall)}});
  spdlog::info("step {}: loss {:.4f}, recall {}", found.step, found.loss,
               JsonText(recall_json(found.recall)).str());
}

void add_number(CLI::App& app, const char* name, int64_t& value, int64_t least, const char* text) {
  app.add_option(name, value, text)->check(whole_number(least))->type_name("N");
}

void add_network_options(CLI::App& app, TrainQmodelArguments& arguments) {
  const HelpSection section(app, "Network");
  QmodelOptions& options = arguments.options;
  add_number(app, "--buckets", options.buckets, 2, "Buckets of each KV head");
  add_number(app, "--hidden", options.hidden, 1, "Hidden units of each network");
  add_number(app, "--steps", options.steps, 1, "Updates of the weights at most");
  add_number(app, "--batch", options.batch, 2, "Queries of a step, of each KV head");
  app.add_option("--near", options.near_queries,
                 "Share of the queries learned from whose best key is among the last --recent "
                 "tokens; of the others the best is further back")
      ->check(real_number(0.0, 1.0))
      ->type_name("X");
  app.add_option("--lr", options.learning_rate, "Learning rate of Adam")
      ->check(real_number(1e-12, 1.0))
      ->type_name("X");
  app.add_option("--decay", arguments.decay, "How the learning rate falls: cosine, to 0, or none")
      ->check(CLI::IsMember({"cosine", "none"}));
  app.add_option("--dense", options.dense,
                 "Layers without buckets, which read everything; layers with a sliding window "
                 "are added")
      ->delimiter(',')
      ->check(whole_number(0))
      ->type_name("LAYER");
  app.add_option("--dtype", arguments.dtype, "Of the weights in the file")
      ->check(CLI::IsMember({"F32", "BF16"}));
}

void add_data_options(CLI::App& app, QmodelOptions& options) {
  const HelpSection section(app, "Samples");
  add_number(
      app, "--window", options.window, 1,
      "Tokens of a window, which is one dense pass: more than four times --recent and --sink");
  add_number(app, "--recent", options.recent, 0,
             "Last tokens that will be attended exactly: their keys do not count");
  add_number(app, "--sink", options.sink, 0, "First tokens that will be attended exactly");
  add_number(app, "--positions", options.positions, 1,
             "Tokens of a window whose queries are looked at");
  add_number(app, "--queries", options.queries, 1, "Of these, kept at most for each KV head");
  add_number(app, "--keys", options.keys_per_bucket, kLeastBucketKeys,
             "Keys that are clustered, by bucket: 32 or more");
  app.add_option("--memory", options.memory,
                 "Bytes of samples that are held to train on, one window's at least (units: K, M, "
                 "G)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50).description(""))
      ->type_name("SIZE");
}

void add_check_options(CLI::App& app, TrainQmodelArguments& arguments) {
  const HelpSection section(app, "Checks");
  app.add_option("--checks", arguments.checks,
                 "Times that held-out recall is measured (default: every 100 steps, at most 20)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->type_name("N");
}

void add_train_qmodel_options(CLI::App& app, TrainQmodelArguments& arguments) {
  app.add_option("TEXT", arguments.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input")
      ->required();
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-o,--output", arguments.output, "The query classifier (.sqz) to write")
      ->required();
  app.add_option("--test", arguments.test,
                 "Texts to measure the result with (default: windows of TEXT that are held out)")
      ->type_name("TEXT");
  app.add_flag("--force", arguments.force, "Replace an existing output");
  add_network_options(app, arguments);
  add_data_options(app, arguments.options);
  add_check_options(app, arguments);
  add_run_dtype_option(app, arguments.run_dtype);
}

Status run_train_qmodel(const TrainQmodelArguments& arguments, const ToolContext& context) {
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(arguments.model));
  const ModelDescription& model = checkpoint->config().description;
  SQZ_ASSIGN_OR_RETURN(const auto documents, find_documents(arguments.texts));
  std::vector<std::string> test_documents;
  if (!arguments.test.empty()) {
    SQZ_ASSIGN_OR_RETURN(test_documents, find_documents(arguments.test));
  }
  std::vector<std::string> inputs = with_model_files(arguments.texts, arguments.model);
  inputs.insert(inputs.end(), arguments.test.begin(), arguments.test.end());
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force, inputs));
  SQZ_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(arguments.model));
  QmodelOptions options = arguments.options;
  options.checks = arguments.checks.value_or(
      std::clamp<int64_t>(options.steps / kStepsOfACheck, 1, kMostChecks));
  options.decay = arguments.decay == "cosine";
  options.seed = context.options.seed;
  options.device = context.options.device;
  options.threads = context.options.threads;
  options.first_token = tokenizer->bos_token().value_or(-1);
  SQZ_ASSIGN_OR_RETURN(const auto texts,
                       read_texts(documents, *tokenizer, model, arguments.model, 0));
  SQZ_ASSIGN_OR_RETURN(const auto test,
                       read_texts(test_documents, *tokenizer, model, arguments.model, 0));
  const Stopwatch watch;
  const RunnerOptions run = runner_options(arguments.run_dtype, context.options);
  SQZ_ASSIGN_OR_RETURN(const auto runner, Runner::load(arguments.model, run));
  const double load_seconds = watch.seconds();

  Progress bar(context.progress_style(), "train");
  options.progress = [&](double done) { bar.update(done); };
  options.check = [&](const QmodelCheck& found) { show(found, context.output); };
  SQZ_ASSIGN_OR_RETURN(QmodelTrained trained, train_qmodel(*runner, texts, test, options));
  bar.finish();
  const double train_seconds = watch.seconds() - load_seconds;

  trained.file.producer = producer_name();
  trained.file.tokenizer_hash = tokenizer->hash();
  trained.file.dtype = *dtype_from_name(arguments.dtype);
  trained.file.training["run_dtype"] = dtype_name(run.dtype);
  SQZ_ASSIGN_OR_RETURN(const uint64_t bytes, write_qmodel_file(Env::posix(), arguments.output,
                                                               arguments.force, trained.file));

  JsonMembers result = qmodel_json(trained.file);
  result["path"] = arguments.output;
  result["bytes"] = bytes;
  result["steps"] = trained.steps;
  result["loss"] = trained.loss;
  result["windows"] = trained.windows;
  result["tokens"] = trained.tokens;
  result["measured_windows"] = trained.held_out;
  result["scores"] = scores_json(trained);
  result["seconds"] = {{"load", load_seconds}, {"train", train_seconds}};
  context.output.result(result);
  return {};
}

}  // namespace

int train_qmodel_main(int argc, char** argv) {
  Tool tool(
      "sqz-train-qmodel",
      "Trains a query classifier for a model: buckets of keys, and networks that say which buckets "
      "a query needs.",
      R"(Method
  Runs the model over windows of the texts. Keys before RoPE are clustered into buckets, a
  set for each KV head; a network for each KV head learns, from queries before RoPE, which
  share of the attention each bucket holds (SAAP). Recall is the share of the attention mass
  beyond the last --recent tokens that is found where a given share of the keys is read.
  The paper's settings are --steps 40000 --batch 1000 --near 0 --lr 1e-5 --decay none.

Refused: fewer than 32 tokens to train on for each bucket, or than two windows; a loss that is
not a number.

Result: path, bytes, steps, loss, windows, tokens, measured_windows, recall{} by
selectivity, the file's metadata, and scores[] with method (classifier; kmeans, which reads
buckets by the products of query and centroid), queries (all; far: the best key is beyond
--recent), recall{}, stderr{} over windows. Events `check`: step, loss, recall{}, far_recall{}.

Examples:
  sqz-train-qmodel --model MODEL books/ -o q.sqz --device cuda
  sqz-train-qmodel --model MODEL books/ -o q.sqz --buckets 256 --test other.txt --json
)");
  TrainQmodelArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const ToolContext& context) { return run_train_qmodel(arguments, context); });
  add_train_qmodel_options(*app, arguments);
  return tool.run(argc, argv, true);
}

}  // namespace sqz
