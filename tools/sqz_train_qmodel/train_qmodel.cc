#include "tools/sqz_train_qmodel/train_qmodel.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "formats/base/stopwatch.h"
#include "formats/checkpoint.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/qmodel_table.h"
#include "tools/common/texts.h"

namespace sqz {
namespace {

// A check takes as long as some ten steps do on a CPU.
constexpr int64_t kStepsOfACheck = 100, kMostChecks = 20;

Result<std::vector<TokenText>> read_texts(std::span<const std::string> documents,
                                          const Tokenizer& tokenizer, const ModelDescription& model,
                                          const std::string& model_path) {
  std::vector<TokenText> out;
  for (const std::string& document : documents) {
    TokenText text;
    text.name = document;
    SQZ_ASSIGN_OR_RETURN(text.tokens, encode_documents(tokenizer, {&document, 1}, 0));
    SQZ_RETURN_IF_ERROR(
        check_ids(text.tokens, model, "the tokenizer of " + model_path, model_path));
    out.push_back(std::move(text));
  }
  return out;
}

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

}  // namespace

Status run_train_qmodel(const TrainQmodelArguments& arguments, const ToolContext& context) {
  SQZ_RETURN_IF_ERROR(check_model_folder(arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::open(arguments.model));
  const ModelDescription& model = checkpoint->config().description;
  SQZ_ASSIGN_OR_RETURN(const auto documents, find_documents(arguments.texts));
  std::vector<std::string> test_documents;
  if (!arguments.test.empty()) {
    SQZ_ASSIGN_OR_RETURN(test_documents, find_documents(arguments.test));
  }
  std::vector<std::string> inputs = arguments.texts;
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
  SQZ_ASSIGN_OR_RETURN(const auto texts, read_texts(documents, *tokenizer, model, arguments.model));
  SQZ_ASSIGN_OR_RETURN(const auto test,
                       read_texts(test_documents, *tokenizer, model, arguments.model));
  const Stopwatch watch;
  const RunnerOptions run = runner_options(arguments.run_dtype, context.options);
  SQZ_ASSIGN_OR_RETURN(const auto runner, load_runner(arguments.model, run));
  const double load_seconds = watch.seconds();

  Progress bar(context.progress_style(), "train");
  options.progress = [&](double done) { bar.update(done); };
  options.check = [&](const QmodelCheck& found) { show(found, context.output); };
  SQZ_ASSIGN_OR_RETURN(QmodelTrained trained, train_qmodel(*runner, texts, test, options));
  bar.finish();
  const double train_seconds = watch.seconds() - load_seconds;

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

}  // namespace sqz
