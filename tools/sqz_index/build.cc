#include <spdlog/spdlog.h>

#include "tools/common/model_options.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/build_options.h"
#include "tools/sqz_index/commands.h"
#include "tools/sqz_index/plan.h"

namespace sqz {
namespace {

void print_index(const std::string& path, const BuiltIndex& index, const ModelDescription& model,
                 const ToolContext& context) {
  const BuildReport& report = index.report;
  const BuildSeconds& seconds = report.seconds;
  context.output.result({{"path", path},
                         {"tokens", report.tokens},
                         {"clustered", report.clustered},
                         {"clusters", report.clusters},
                         {"pages", report.pages},
                         {"bytes", report.bytes},
                         {"build_id", report.build_id},
                         {"seconds",
                          {{"capture", index.capture_seconds},
                           {"cluster", seconds.cluster},
                           {"calibrate", seconds.calibrate},
                           {"write", seconds.write}}},
                         {"engine", report.engine},
                         {"fingerprint", fingerprint(model)}});
}

Status build_one(const BuildArguments& arguments, const ToolContext& context) {
  const RunnerOptions pass = runner_options(arguments.source.run_dtype, context.options);
  const bool on_gpu = context.options.gpu().has_value();
  std::optional<Source> source;
  BuildInput input;
  if (!arguments.capture.empty()) {
    SQZ_ASSIGN_OR_RETURN(input, open_capture(arguments.capture));
  } else {
    SQZ_ASSIGN_OR_RETURN(input.tokens, read_tokens(arguments.source, source));
    input.model = source->model().description;
    input.chat = source->chat();
  }
  SQZ_ASSIGN_OR_RETURN(const BuildOptions options, options_for(arguments, input.model));
  SQZ_ASSIGN_OR_RETURN(const auto builder, plan_index(input, options));
  SQZ_ASSIGN_OR_RETURN(const BuildPlan plan, builder->plan(on_gpu && source));
  if (plan.clusters.empty() && plan.pages == 0) {
    spdlog::warn(
        "{}: every layer of the model has a sliding window and is read whole, whatever the "
        "budget: this index will save nothing",
        arguments.output);
  }
  if (arguments.dry_run) {
    const auto tokens = std::ssize(input.tokens.ids);
    PlanTotal total;
    total.add(plan, tokens, source ? pass_memory(source->model(), tokens, pass) : 0, on_gpu);
    total.print(context);
    return {};
  }
  std::vector<std::string> inputs = named_files(arguments.source);
  inputs.insert(inputs.end(), {arguments.capture, arguments.layers, arguments.qmodel});
  SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force, inputs));
  SQZ_RETURN_IF_ERROR(builder->begin(Env::posix(), arguments.output, arguments.force));
  std::unique_ptr<Runner> runner;
  if (source) {
    SQZ_ASSIGN_OR_RETURN(runner, load_runner(arguments.source.model, pass));
  }
  Progress progress(context.progress_style(), "build");
  SQZ_ASSIGN_OR_RETURN(const BuiltIndex index,
                       build_index(*builder, input, runner.get(), progress));
  print_index(arguments.output, index, input.model, context);
  return {};
}

}  // namespace

void add_build_command(Tool& tool) {
  const auto arguments = std::make_shared<BuildArguments>();
  CLI::App* app = tool.command(
      "build", "Build the index of a fixed context: texts, token ids or a capture.",
      "Texts are one context, encoded file by file, with the model's special tokens once,\n"
      "at the start. Hidden files of a folder and files with a zero byte are left out.\n"
      "--tokens takes one dimension of int32, int64, uint32 or uint16.\n"
      "\n"
      "--chat is for instruct models: the texts stand in the system turn of the model's\n"
      "chat template (Mistral before version 7: in the user's), which the index stores,\n"
      "and sqz-generate puts each prompt into the user's turn. Templates of Llama 3,\n"
      "Mistral and ChatML (Qwen) are known. For any other, --chat-format F.json gives\n"
      "the texts around the turns: {\"before\": \"\", \"between\": \"\", \"after\": \"\",\n"
      "\"end\": [tokens that end an answer], \"trim\": false}; `python -m sqz.chat MODEL`\n"
      "writes it. Special tokens that a text spells out are text.\n"
      "\n"
      "--manifest F.jsonl builds a corpus: a line a document, {\"key\": \"a/b\", \"texts\":\n"
      "[\"a.md\", \"b/\"]}, or with \"tokens\" or \"capture\", becomes DIR/a/b.sqz. Paths begin\n"
      "at the manifest's folder. An index that is there and of the same tokens, model\n"
      "and options is done; another is refused, or replaced with --force. A document\n"
      "that fails stops no other. Exit code: 0 if all are there, 1 if some failed, 3 if\n"
      "all failed. With --json an event `document` each: key, path, line, state (built,\n"
      "there or failed), tokens, bytes, build_id, seconds, or code and message.\n"
      "\n"
      "Result: path, tokens, clustered, clusters[], pages, bytes, build_id,\n"
      "seconds{capture, cluster, calibrate, write}, engine, fingerprint; of a manifest\n"
      "documents, built, there, failed, tokens, seconds.\n"
      "\n"
      "--dry-run: indexes, tokens, clusters[], pages, bytes (exact), peak_memory,\n"
      "gpu_memory, gpu_memory_least (one KV head at a time; 0 without a GPU).\n"
      "\n"
      "Examples:\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --chat\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --dry-run\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --partition pages\n"
      "  sqz-index build --model MODEL --manifest corpus.jsonl -o indexes/ --shard 3/16\n"
      "  sqz-index build --capture book.h5 -o book.sqz --level-fractions 0.05\n",
      [arguments](const ToolContext& context) -> Status {
        SQZ_RETURN_IF_ERROR(complete(*arguments, context.options));
        return arguments->manifest.empty() ? build_one(*arguments, context)
                                           : build_from_manifest(*arguments, context);
      });
  add_build_options(*app, *arguments);
}

}  // namespace sqz
