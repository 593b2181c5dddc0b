#include <spdlog/spdlog.h>

#include <filesystem>
#include <numeric>
#include <set>

#include "formats/capture.h"
#include "tools/common/index_table.h"
#include "tools/common/layer_policy.h"
#include "tools/common/load_runner.h"
#include "tools/common/prompts.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/build_manifest.h"
#include "tools/sqz_index/build_options.h"
#include "tools/sqz_index/commands.h"
#include "tools/sqz_index/plan.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

// One index to build. `documents` is a span of Source::documents(), or empty for token ids.
struct Job {
  std::string output;
  std::string label;  // for progress and messages
  FixedTokens tokens;
  std::optional<BuiltIndex> built = {};  // before
};

Result<std::vector<Job>> make_jobs(const Source& source, const BuildArguments& arguments) {
  std::vector<Job> jobs;
  const std::span<const Document> all = source.documents();
  if (!arguments.separate) {
    SQZ_ASSIGN_OR_RETURN(FixedTokens tokens, source.tokens(all));
    jobs.push_back({arguments.output, "build", std::move(tokens)});
    return jobs;
  }
  std::set<std::string> names;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string output = (fs::path(arguments.output) / (all[i].name + ".sqz")).string();
    if (!names.insert(output).second) {
      return Status(Code::kInvalidArgument,
                    concat(all[i].path, ": two documents would be written to ", output,
                           "; build them into different folders"));
    }
    SQZ_ASSIGN_OR_RETURN(FixedTokens tokens, source.tokens(all.subspan(i, 1)));
    jobs.push_back({output, all[i].name, std::move(tokens)});
  }
  return jobs;
}

// No layer has keys that are split: the index holds, and sessions read, everything.
bool saves_nothing(const BuildPlan& plan) {
  return plan.clusters.empty() && plan.pages == 0;
}

void warn_if_nothing_saved(const BuildPlan& plan, const std::string& label) {
  if (!saves_nothing(plan)) return;
  spdlog::warn(
      "{}: every layer of the model has a sliding window and is read whole, whatever the "
      "budget: this index will save nothing",
      label);
}

// What --resume finds done.
std::optional<BuiltIndex> built_before(const ModelDescription& model, const FixedTokens& tokens,
                                       const IndexTarget& target) {
  if (!target.options.resume || target.force) return std::nullopt;
  const auto found = find_built(model, tokens, target);
  return found.ok() ? std::optional(*found) : std::nullopt;
}

// Everything that can be refused is refused before the model is loaded.
Status check_jobs(std::vector<Job>& jobs, const Source& source, const BuildArguments& arguments,
                  const BuildOptions& options) {
  const ModelDescription& model = source.model().description;
  std::vector<std::string> outputs, inputs = files_of(arguments);
  for (const Job& job : jobs) outputs.push_back(job.output);
  for (std::string& path : paths_of(source.documents())) inputs.push_back(std::move(path));
  if (!arguments.dry_run) SQZ_RETURN_IF_ERROR(check_not_inputs(outputs, inputs));
  for (Job& job : jobs) {
    const auto tokens = static_cast<int64_t>(job.tokens.ids.size());
    const auto plan = IndexBuilder::plan(model, tokens, options);
    if (!plan.ok()) {
      return {plan.status().code(), concat(job.label, ": ", plan.status().message())};
    }
    if (!arguments.calibrate_with.empty() && saves_nothing(*plan)) {
      return {Code::kUnsupported, concat(job.label,
                                         ": every layer of the model has a sliding window and is "
                                         "stored dense: there is nothing to calibrate")};
    }
    warn_if_nothing_saved(*plan, job.label);
    if (arguments.dry_run) continue;
    if (arguments.separate) {
      SQZ_RETURN_IF_ERROR(make_folder(fs::path(job.output).parent_path(), job.output));
    }
    job.built = built_before(model, job.tokens, {job.output, arguments.force, options});
    if (!job.built) SQZ_RETURN_IF_ERROR(check_output(job.output, arguments.force));
  }
  return {};
}

// What the keys of a KV head were split into.
std::pair<std::string, std::string> parts_row(const BuildOptions& options,
                                              const std::vector<int64_t>& clusters, int64_t pages) {
  if (pages > 0) return {"pages", concat(pages, " a KV head")};
  if (clusters.empty()) return {"clusters", "none: every layer has a sliding window"};
  if (options.partition == Partition::kBuckets) {
    return {"buckets", list_text(clusters) + " a KV head"};
  }
  return {"clusters", list_text(clusters) + " a KV head, coarse to fine"};
}

Rows index_rows(const std::string& path, const BuiltIndex& index, const BuildOptions& options) {
  const BuildReport& report = index.report;
  const BuildSeconds& seconds = report.seconds;
  const bool calibrated = !report.clusters.empty() &&
                          (options.partition == Partition::kKmeans || options.calibrate_keys);
  Rows rows = {
      {"index", path},
      {"tokens", concat(report.tokens, ", of which ", report.clustered, " clustered")},
      parts_row(options, report.clusters, report.pages),
      {"size", bytes_text(static_cast<double>(report.bytes))},
      {"time", concat("capture ", seconds_text(index.capture_seconds), ", cluster ",
                      seconds_text(seconds.cluster), ", calibrate ",
                      seconds_text(seconds.calibrate), ", write ", seconds_text(seconds.write))},
      {"engine", report.engine},
      {"calibration", calibrated ? calibration_text(index.calibration) : "none"},
      {"model", index.fingerprint}};
  if (report.resumed > 0) rows.emplace_back("resumed", concat(report.resumed, " layers"));
  return rows;
}

Status print_plan(const BuildPlan& plan, const PassPlan& pass, const BuildOptions& options,
                  int64_t tokens, size_t indexes, const ToolContext& context) {
  const bool gpu_pass = context.options.gpu().has_value();
  const double seconds =
      estimate_seconds(pass.flop, plan.kmeans_flop, context.options.threads, gpu_pass);
  const uint64_t memory = plan.peak_memory + (gpu_pass ? 0 : pass.memory);
  const uint64_t gpu_pass_memory = gpu_pass ? pass.memory : 0;
  const uint64_t gpu_memory = plan.gpu_memory + gpu_pass_memory;
  const uint64_t gpu_least = plan.gpu_memory_least + gpu_pass_memory;
  Rows rows = {
      {"tokens", concat(tokens)},
      {"size", concat(bytes_text(static_cast<double>(plan.bytes)), " (", plan.bytes, " bytes)")},
      {"peak memory", "about " + bytes_text(static_cast<double>(memory))},
      {"time", "about " + seconds_text(seconds)}};
  if (indexes == 1) rows.insert(rows.begin() + 1, parts_row(options, plan.clusters, plan.pages));
  if (gpu_memory > 0) {
    rows.emplace_back("GPU memory",
                      concat("about ", bytes_text(static_cast<double>(gpu_memory)), ", at least ",
                             bytes_text(static_cast<double>(gpu_least))));
  }
  context.output.result({{"dry_run", true},
                         {"indexes", indexes},
                         {"tokens", tokens},
                         {"clusters", plan.clusters},
                         {"pages", plan.pages},
                         {"bytes", plan.bytes},
                         {"peak_memory", memory},
                         {"gpu_memory", gpu_memory},
                         {"gpu_memory_least", gpu_least},
                         {"seconds_estimate", seconds}},
                        rows);
  return {};
}

Status dry_run(const std::vector<Job>& jobs, const ModelConfig& model,
               const BuildArguments& arguments, const BuildOptions& options,
               const ToolContext& context) {
  BuildPlan total;
  PassPlan pass_total;
  int64_t tokens_total = 0;
  for (const Job& job : jobs) {
    const auto tokens = static_cast<int64_t>(job.tokens.ids.size());
    SQZ_ASSIGN_OR_RETURN(
        const BuildPlan plan,
        IndexBuilder::plan(model.description, tokens, options, context.options.gpu().has_value()));
    const PassPlan pass =
        plan_pass(model, tokens, runner_options(arguments.source, context.options));
    total.bytes += plan.bytes;
    total.kmeans_flop += plan.kmeans_flop;
    total.peak_memory = std::max(total.peak_memory, plan.peak_memory);
    total.gpu_memory = std::max(total.gpu_memory, plan.gpu_memory);
    total.gpu_memory_least = std::max(total.gpu_memory_least, plan.gpu_memory_least);
    if (jobs.size() == 1) {
      total.clusters = plan.clusters;
      total.pages = plan.pages;
    }
    pass_total.flop += pass.flop;
    pass_total.memory = std::max(pass_total.memory, pass.memory);
    tokens_total += tokens;
  }
  return print_plan(total, pass_total, options, tokens_total, jobs.size(), context);
}

// The totals of several indexes, under the same names as the fields of one.
void print_total(const std::vector<JsonMembers>& built, int64_t tokens, uint64_t bytes,
                 const ToolContext& context) {
  context.output.result({{"indexes", built}, {"tokens", tokens}, {"bytes", bytes}},
                        {{"indexes", concat(built.size())},
                         {"tokens", concat(tokens)},
                         {"size", bytes_text(static_cast<double>(bytes))}});
}

Result<CalibrationPrompts> calibration_prompts(const BuildArguments& arguments,
                                               const Source& source, const std::vector<Job>& jobs) {
  CalibrationPrompts out;
  out.answer_tokens = arguments.answer_tokens;
  if (arguments.calibrate_with.empty()) return out;
  SQZ_ASSIGN_OR_RETURN(const auto prompts, read_prompts(Env::posix(), arguments.calibrate_with));
  SQZ_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(arguments.source.model));
  int64_t longest = 0;
  for (const Job& job : jobs) longest = std::max(longest, std::ssize(job.tokens.ids));
  SQZ_ASSIGN_OR_RETURN(out.prompts, encode_prompts(*tokenizer, prompts, source.model().description,
                                                   longest, source.chat()));
  return out;
}

Status build_from_texts(const BuildArguments& arguments, const ToolContext& context) {
  QmodelFile qmodel;
  SQZ_ASSIGN_OR_RETURN(const Source source, Source::open(arguments.source));
  if (!source.documents().empty() && !source.chat()) {
    warn_of_chat_template(arguments.source.model);
  }
  SQZ_ASSIGN_OR_RETURN(BuildOptions options, full_options(arguments, context.options,
                                                          source.model().description, qmodel));
  options.chat = source.chat_json();
  SQZ_ASSIGN_OR_RETURN(std::vector<Job> jobs, make_jobs(source, arguments));
  SQZ_RETURN_IF_ERROR(check_jobs(jobs, source, arguments, options));
  SQZ_ASSIGN_OR_RETURN(const CalibrationPrompts prompts,
                       calibration_prompts(arguments, source, jobs));
  if (arguments.dry_run) return dry_run(jobs, source.model(), arguments, options, context);

  std::unique_ptr<Runner> runner;
  if (!std::all_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.built; })) {
    SQZ_ASSIGN_OR_RETURN(runner, load_runner(arguments.source.model,
                                             runner_options(arguments.source, context.options)));
  }
  std::vector<JsonMembers> built;
  int64_t tokens = 0;
  uint64_t bytes = 0;
  for (const Job& job : jobs) {
    spdlog::debug("{}: {} tokens", job.label, job.tokens.ids.size());
    Progress progress(context.progress_style(), job.label);
    const IndexTarget target{job.output, arguments.force, options};
    SQZ_ASSIGN_OR_RETURN(const BuiltIndex index,
                         job.built ? *job.built
                         : prompts.prompts.empty()
                             ? build_from_model(*runner, job.tokens, target, progress)
                             : build_with_prompts(*runner, job.tokens, target, prompts, progress));
    built.push_back(index_json(job.output, index));
    tokens += index.report.tokens;
    bytes += index.report.bytes;
    if (!arguments.separate) {
      context.output.result(built.back(), index_rows(job.output, index, options));
      return {};
    }
    context.output.event("index", built.back());
  }
  print_total(built, tokens, bytes, context);
  return {};
}

Status build_from_file(const BuildArguments& arguments, const ToolContext& context) {
  QmodelFile qmodel;
  SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(arguments.capture));
  const CaptureInfo& info = capture->info();
  SQZ_ASSIGN_OR_RETURN(const BuildOptions options,
                       full_options(arguments, context.options, info.model, qmodel));
  const auto tokens = static_cast<int64_t>(info.tokens.size());
  SQZ_ASSIGN_OR_RETURN(const BuildPlan plan, IndexBuilder::plan(info.model, tokens, options));
  SQZ_RETURN_IF_ERROR(check_capture(info, arguments.capture, options.tail));
  warn_if_nothing_saved(plan, arguments.capture);
  if (arguments.dry_run) return print_plan(plan, {}, options, tokens, 1, context);
  const IndexTarget target{arguments.output, arguments.force, options};
  const auto built = built_before(info.model, {info.tokens, info.tokenizer_hash}, target);
  if (!built) {
    SQZ_RETURN_IF_ERROR(check_output(arguments.output, arguments.force, files_of(arguments)));
  }
  Progress progress(context.progress_style(), "build");
  SQZ_ASSIGN_OR_RETURN(const BuiltIndex index,
                       built ? *built : build_from_capture(*capture, target, progress));
  context.output.result(index_json(arguments.output, index),
                        index_rows(arguments.output, index, options));
  return {};
}

}  // namespace

void add_build_command(Tool& tool) {
  const auto arguments = std::make_shared<BuildArguments>();
  CLI::App* app = tool.command(
      "build", "Build the index of a fixed context: texts, token ids or a capture.",
      "Texts are encoded file by file, with the model's special tokens once, at the\n"
      "start. Hidden files of a folder and files with a zero byte are left out.\n"
      "--tokens takes one dimension of int32, int64, uint32 or uint16.\n"
      "--calibrate-with needs the room of a second index on the disk while it runs.\n"
      "\n"
      "--chat is for instruct models: the texts stand in the system turn of the model's\n"
      "chat template (Mistral before version 7: in the user's), which the index stores,\n"
      "and sqz-generate puts each prompt into the user's turn. Templates of Llama 3,\n"
      "Mistral and ChatML (Qwen) are known. For any other, --chat-format F.json gives\n"
      "the texts around the turns: {\"before\": \"\", \"between\": \"\", \"after\": \"\",\n"
      "\"end\": [tokens that end an answer], \"trim\": false}; `python -m sqz.chat MODEL`\n"
      "writes it. Special tokens that a text spells out are text.\n"
      "\n"
      "Without --resume a build that is killed leaves nothing. With it, whole layers\n"
      "stay in OUTPUT.tmp.resume, and the same command takes them over: the model runs\n"
      "again, they are not clustered again, and the bytes are those of one run. An\n"
      "OUTPUT of the same model, tokens and options is done and stays (--force makes it\n"
      "again). A file of other options is refused; sqz-index gc removes it.\n"
      "\n"
      "--manifest F.jsonl builds a corpus: a line a document, {\"key\": \"a/b\", \"texts\":\n"
      "[\"a.md\", \"b/\"]}, or with \"tokens\" or \"capture\", becomes DIR/a/b.sqz. Paths begin\n"
      "at the manifest's folder. An index that is there and of the same tokens, model\n"
      "and options is done; another is refused, or replaced with --update. A document\n"
      "that fails stops no other. Exit code: 0 if all are there, 1 if some failed, 3 if\n"
      "all failed. With --json an event `document` each: key, path, line, state (built,\n"
      "there or failed), tokens, bytes, build_id, seconds, or code and message. --status\n"
      "keeps them. --device cuda:all spreads the documents over all GPUs.\n"
      "\n"
      "Result: path, tokens, clustered, clusters[], pages, bytes, build_id, resumed (layers),\n"
      "seconds{capture, cluster, calibrate, write}, engine (none if the index was\n"
      "there), calibration, fingerprint; with --separate an event `index` each, and\n"
      "indexes[].\n"
      "\n"
      "--dry-run: indexes, tokens, clusters[], pages, bytes (exact), peak_memory,\n"
      "gpu_memory, gpu_memory_least (one KV head at a time; 0 without a GPU),\n"
      "seconds_estimate (to a factor of two).\n"
      "\n"
      "Examples:\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --chat\n"
      "  sqz-index build --model MODEL docs/ --separate -o indexes/\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --dry-run\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --calibrate-with "
      "questions.txt\n"
      "  sqz-index build --model MODEL book.txt -o book.sqz --partition pages\n"
      "  sqz-index build --model MODEL docs/ --separate -o indexes/ --resume\n"
      "  sqz-index build --model MODEL --manifest corpus.jsonl -o indexes/ --shard auto\n"
      "  sqz-index build --capture book.h5 -o book.sqz --level-fractions 0.05\n",
      [arguments](const ToolContext& context) -> Status {
        SQZ_RETURN_IF_ERROR(check_arguments(*arguments));
        if (!arguments->manifest.empty()) return build_from_manifest(*arguments, context);
        if (context.options.device == "cuda:all") {
          return {Code::kInvalidArgument,
                  "--device cuda:all is for a corpus: pass --manifest F.jsonl, or one device"};
        }
        return arguments->capture.empty() ? build_from_texts(*arguments, context)
                                          : build_from_file(*arguments, context);
      });
  add_build_options(*app, *arguments);
}

}  // namespace sqz
