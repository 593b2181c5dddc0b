// The work of `sqz-index build`: one index, or with --manifest one a document.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "formats/base/stopwatch.h"
#include "libindex/describe.h"
#include "tools/common/index_context.h"
#include "tools/common/model_options.h"
#include "tools/common/selector_options.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/build_options.h"
#include "tools/sqz_index/manifest.h"

namespace sqz {
namespace {

// Bytes of a model's dense pass over `tokens` tokens: weights, hidden states, one layer's keys,
// values and queries.
uint64_t pass_memory(const ModelConfig& model, int64_t tokens, const RunnerOptions& options) {
  const ModelDescription& m = model.description;
  const auto n = static_cast<double>(tokens);
  const auto hidden = static_cast<double>(m.hidden_size);
  const auto inner = static_cast<double>(model.intermediate_size);
  const auto queries = static_cast<double>(m.query_heads * m.head_dim);
  const auto keys = static_cast<double>(m.kv_heads * m.head_dim);
  const double layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner;
  const double embeddings =
      hidden * static_cast<double>(m.vocab_size) * (model.tie_embeddings ? 1 : 2);
  const auto element = static_cast<double>(dtype_size(options.dtype));
  const bool stored = options.device == "cpu" && options.dtype == DType::kF32;
  const auto of_weight = stored ? static_cast<double>(dtype_size(model.dtype)) : element;
  const double weights = of_weight * (embeddings + static_cast<double>(m.layers) * layer);
  // The residual stream, its norm and the attention output; queries; keys and values, and once
  // more as float32 for the consumer.
  double states = element * n * (3 * hidden + 2 * queries + 2 * keys) + 4 * n * 2 * keys;
  if (options.device != "cpu") {
    // Norms and the MLP take a block at a time. The attention's output is there as the kernel
    // wrote it, and twice as float32 while it is put in order.
    states = element * n * (hidden + 2 * queries + 2 * keys) + 8 * n * queries +
             element * static_cast<double>(std::min(tokens, kGpuChunk)) * (4 * inner + 2 * hidden);
  }
  return static_cast<uint64_t>(weights + states);
}

// The sum over the indexes of a build: bytes of all, memory of the largest.
class PlanTotal {
 public:
  // `pass`: pass_memory(), on the GPU if `gpu_pass`; 0 without a model.
  void add(const BuildPlan& plan, int64_t tokens, uint64_t pass, bool gpu_pass) {
    const uint64_t on_cpu = gpu_pass ? 0 : pass, on_gpu = gpu_pass ? pass : 0;
    const bool first = indexes_++ == 0;
    tokens_ += tokens;
    sum_.bytes += plan.bytes;
    sum_.peak_memory = std::max(sum_.peak_memory, plan.peak_memory + on_cpu);
    sum_.gpu_memory = std::max(sum_.gpu_memory, plan.gpu_memory + on_gpu);
    sum_.gpu_memory_least = std::max(sum_.gpu_memory_least, plan.gpu_memory_least + on_gpu);
    sum_.clusters = first ? plan.clusters : std::vector<int64_t>();  // of one index only
    sum_.pages = first ? plan.pages : 0;
  }

  void print(const ToolContext& context) const {
    context.output.result({{"dry_run", true},
                           {"indexes", indexes_},
                           {"tokens", tokens_},
                           {"clusters", sum_.clusters},
                           {"pages", sum_.pages},
                           {"bytes", sum_.bytes},
                           {"peak_memory", sum_.peak_memory},
                           {"gpu_memory", sum_.gpu_memory},
                           {"gpu_memory_least", sum_.gpu_memory_least}});
  }

 private:
  int64_t indexes_ = 0, tokens_ = 0;
  BuildPlan sum_;
};

struct Outcome {
  BuildReport report;
  bool there = false;  // before
};

// Builds documents, with one model.
class Builds {
 public:
  Builds(const BuildArguments& arguments, const ToolContext& context)
      : arguments_(arguments),
        context_(context),
        corpus_(!arguments.manifest.empty()),
        pass_(runner_options(arguments.source.run_dtype, context.options)) {}

  Result<Outcome> build(const ManifestEntry& entry, const std::string& output, Progress& progress) {
    SQZ_ASSIGN_OR_RETURN(BuildInput input, read(entry));
    if (!arguments_.layers.empty()) {
      SQZ_ASSIGN_OR_RETURN(input.options.layer_budgets,
                           read_layer_budgets(arguments_.layers, input.model));
    }
    SQZ_ASSIGN_OR_RETURN(const auto builder,
                         IndexBuilder::prepare(input.model, input.tokens.ids,
                                               input.tokens.tokenizer_hash, input.options));
    if (corpus_) {
      SQZ_ASSIGN_OR_RETURN(const auto there, find(*builder, output));
      if (there) return Outcome{*there, true};
    }
    SQZ_ASSIGN_OR_RETURN(const BuildPlan plan, builder->plan(on_gpu() && !input.capture));
    if (plan.clusters.empty() && plan.pages == 0) {
      spdlog::warn(
          "{}: every layer is read whole, whatever the budget: this index will save nothing",
          output);
    }
    if (arguments_.dry_run) {
      const int64_t tokens = std::ssize(input.tokens.ids);
      total_.add(plan, tokens, input.capture ? 0 : pass_memory(source_->model(), tokens, pass_),
                 on_gpu());
      return Outcome{};
    }
    SQZ_RETURN_IF_ERROR(prepare(output));
    SQZ_RETURN_IF_ERROR(builder->begin(Env::posix(), output, arguments_.force));
    Runner* runner = nullptr;
    if (input.capture == nullptr) {
      SQZ_ASSIGN_OR_RETURN(runner, load());
    }
    const auto built = build_index(*builder, input, runner, progress);
    if (built.ok()) return Outcome{*built};
    if (!corpus_ || built.status().code() != Code::kExists) return built.status();
    // Another process has made a file meanwhile.
    SQZ_ASSIGN_OR_RETURN(const auto others, find(*builder, output));
    return others ? Result<Outcome>(Outcome{*others, true}) : built.status();
  }

  void print_plan() const { total_.print(context_); }

 private:
  bool on_gpu() const { return context_.options.gpu().has_value(); }

  Result<BuildInput> read(const ManifestEntry& entry) {
    if (!entry.capture.empty()) return open_capture(entry.capture, arguments_.build);
    if (entry.texts.empty() && entry.tokens.empty()) return no_context();
    if (!source_) {
      SQZ_ASSIGN_OR_RETURN(source_,
                           Source::open(arguments_.source, corpus_ || entry.tokens.empty()));
      SQZ_RETURN_IF_ERROR(open_front());
    }
    BuildInput out;
    out.model = source_->model().description;
    out.options = arguments_.build;
    out.options.chat = source_->chat();
    out.options.after = after_;
    out.front = front_.get();
    SQZ_ASSIGN_OR_RETURN(out.tokens, source_->read(entry.texts, entry.tokens, front_tokens_));
    return out;
  }

  // The contexts of --after, read densely.
  Status open_front() {
    if (arguments_.after.empty()) return {};
    SQZ_ASSIGN_OR_RETURN(const auto indexes,
                         open_indexes(arguments_.after, source_->model().description,
                                      source_->tokenizer(), arguments_.source.model));
    for (const auto& index : indexes) {
      if (const auto gpu = context_.options.gpu()) SQZ_RETURN_IF_ERROR(index->upload(*gpu));
      after_.emplace_back(index->info().context_id);
    }
    auto dense = runtime::dense_options();
    dense.max_tokens = kMaxContextTokens;
    dense.threads = context_.options.threads;
    dense.max_contexts = static_cast<int32_t>(after_.size()) + 1;  // the new one must have room
    SQZ_ASSIGN_OR_RETURN(front_, IndexContext::create(indexes, dense));
    front_tokens_ = front_->tokens();
    front_->end_at_zero();
    return {};
  }

  // Checks that a file can be made, for a corpus in a folder that is made.
  Status prepare(const std::string& output) const {
    if (!corpus_) {
      std::vector<std::string> inputs = named_files(arguments_.source);
      inputs.insert(inputs.end(), {arguments_.capture, arguments_.layers, arguments_.qmodel});
      inputs.insert(inputs.end(), arguments_.after.begin(), arguments_.after.end());
      return check_output(output, arguments_.force, inputs);
    }
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(output).parent_path(), error);
    if (error) return {Code::kIo, concat(output, ": create folder: ", error.message())};
    return check_output(output, arguments_.force, arguments_.after);
  }

  // The model, which is loaded for the first document that needs it.
  Result<Runner*> load() {
    if (model_ == nullptr) {
      SQZ_ASSIGN_OR_RETURN(model_, Runner::load(arguments_.source.model, pass_));
      spdlog::debug("{}: loaded on {}", arguments_.source.model, pass_.device);
    }
    return model_.get();
  }

  // The index that is there, if this build would make it. Nothing if there is no file, or another
  // that may be replaced.
  Result<std::optional<BuildReport>> find(const IndexBuilder& builder,
                                          const std::string& output) const {
    const auto found = builder.find(Env::posix(), output);
    if (found.ok()) return std::optional(*found);
    const Status& status = found.status();
    if (status.code() == Code::kNotFound || arguments_.force) return std::optional<BuildReport>();
    if (status.code() == Code::kIo) return status;
    return Status(status.code() == Code::kMismatch ? Code::kExists : status.code(),
                  status.message() + "; pass --force to replace it");
  }

  const BuildArguments& arguments_;
  const ToolContext& context_;
  const bool corpus_;
  const RunnerOptions pass_;
  std::optional<Source> source_;  // of the model, once it was needed
  std::unique_ptr<Runner> model_;
  std::unique_ptr<IndexContext> front_;  // of --after
  int64_t front_tokens_ = 0;
  std::vector<std::string> after_;  // their ids
  PlanTotal total_;
};

// Counts how the documents ended, and says so as they end.
class Tally {
 public:
  Tally(const BuildArguments& arguments, const ToolContext& context, size_t documents)
      : arguments_(arguments),
        context_(context),
        count_(static_cast<int64_t>(documents)),
        progress_(context.progress_style(), arguments.manifest) {}

  void add(const ManifestEntry& entry, const Result<Outcome>& document, double seconds) {
    JsonMembers fields = {{"key", entry.key},
                          {"line", entry.line},
                          {"path", entry.output(arguments_.output)},
                          {"seconds", seconds}};
    const std::string state = !document.ok() ? "failed" : document->there ? "there" : "built";
    ++counts_[state];
    fields["state"] = state;
    if (!document.ok()) {
      const Status& status = document.status();
      spdlog::error("{}: line {}: {}: {}", arguments_.manifest, entry.line, entry.key,
                    status.message());
      fields.merge(JsonMembers{{"code", code_name(status.code())}, {"message", status.message()}});
    } else {
      const BuildReport& report = document->report;
      tokens_ += document->there ? 0 : report.tokens;
      fields.merge(JsonMembers{
          {"tokens", report.tokens}, {"bytes", report.bytes}, {"build_id", report.build_id}});
    }
    if (!arguments_.dry_run) context_.output.event("document", fields);
    progress_.update(static_cast<double>(++done_) / static_cast<double>(count_));
  }

  Status failures() {
    const int64_t failed = counts_["failed"];
    if (failed == 0) return {};
    return {failed < count_ ? Code::kIo : Code::kCorrupt,
            concat(arguments_.manifest, ": ", failed, " of ", count_, " documents failed")};
  }

  void print(double seconds) {
    context_.output.result({{"documents", count_},
                            {"built", counts_["built"]},
                            {"there", counts_["there"]},
                            {"failed", counts_["failed"]},
                            {"tokens", tokens_},
                            {"seconds", seconds}});
  }

 private:
  const BuildArguments& arguments_;
  const ToolContext& context_;
  const int64_t count_;
  Progress progress_;
  std::map<std::string, int64_t> counts_;  // by state
  int64_t done_ = 0, tokens_ = 0;          // tokens: of the indexes that were built
};

Status build_corpus(const BuildArguments& arguments, const ToolContext& context, Builds& builds) {
  SQZ_ASSIGN_OR_RETURN(const auto entries, read_manifest(arguments.manifest, arguments.shard));
  Tally tally(arguments, context, entries.size());
  const Stopwatch watch;
  for (const ManifestEntry& entry : entries) {
    const Stopwatch one;
    Progress none(ProgressStyle::kNone, entry.key);
    const auto document =
        within_memory([&] { return builds.build(entry, entry.output(arguments.output), none); },
                      "not enough memory");
    tally.add(entry, document, one.seconds());
  }
  if (arguments.dry_run) {
    builds.print_plan();
  } else {
    tally.print(watch.seconds());
  }
  return tally.failures();
}

}  // namespace

Status run_build(const BuildArguments& arguments, const ToolContext& context) {
  Builds builds(arguments, context);
  if (!arguments.manifest.empty()) return build_corpus(arguments, context, builds);
  Progress progress(context.progress_style(), "build");
  const ManifestEntry entry{0, "", arguments.source.texts, arguments.source.tokens,
                            arguments.capture};
  SQZ_ASSIGN_OR_RETURN(const Outcome built, builds.build(entry, arguments.output, progress));
  if (arguments.dry_run) {
    builds.print_plan();
  } else {
    context.output.result(describe_build(arguments.output, built.report));
  }
  return {};
}

}  // namespace sqz
