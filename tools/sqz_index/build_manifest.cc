#include "tools/sqz_index/build_manifest.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <mutex>
#include <new>

#include "formats/base/parallel.h"
#include "formats/base/stopwatch.h"
#include "formats/capture.h"
#include "tools/common/load_runner.h"
#include "tools/common/output_file.h"
#include "tools/common/signals.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/manifest.h"
#include "tools/sqz_index/status_file.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

// Tokens that a GPU works on at a time, as far as they are of several documents.
constexpr int64_t kGpuTokens = 65536;

struct Outcome {
  BuiltIndex index;
  bool there = false;  // before
};

// Where models run. Those of all documents share it; `model` is loaded for the first that needs it.
struct Device {
  Device(RunnerOptions runner, int gpu_number, int64_t tokens)
      : options(std::move(runner)), gpu(gpu_number), gate(tokens) {}

  Result<Runner*> runner(const std::string& folder) {
    const std::lock_guard lock(loading);
    if (model == nullptr) {
      SQZ_ASSIGN_OR_RETURN(model, load_runner(folder, options));
      spdlog::debug("{}: loaded on {}", folder, options.device);
    }
    return model.get();
  }

  const RunnerOptions options;
  const int gpu;
  TokenGate gate;
  std::mutex loading;
  std::unique_ptr<Runner> model;
};

Result<std::deque<Device>> devices_of(const BuildArguments& arguments,
                                      const CommonOptions& common) {
  std::deque<Device> out;
  RunnerOptions options = runner_options(arguments.source, common);
  const bool all = common.device == "cuda:all";
  const int count = all ? gpu_count() : 1;
  for (int i = 0; i < count; ++i) {
    if (all) options.device = concat("cuda:", i);
    out.emplace_back(options, all ? i : common.gpu().value_or(0), common.gpu() ? kGpuTokens : 0);
  }
  if (!out.empty()) return out;
  return Status(Code::kInvalidArgument, "--device cuda:all: no CUDA device was found");
}

// Builds documents, on several threads at once: reading, the model with the clustering of its
// layers, and the calibration and writing of different documents overlap.
class Corpus {
 public:
  Corpus(const BuildArguments& arguments, const ToolContext& context)
      : arguments_(arguments), context_(context) {}

  Result<Outcome> build(const ManifestEntry& entry, Device& device) {
    const std::string output = entry.output(arguments_.output);
    if (!entry.capture.empty()) return build_capture(entry, output, device);
    SQZ_ASSIGN_OR_RETURN(const FixedTokens tokens, read(entry));
    BuildOptions options = options_;
    options.gpu = device.gpu;
    const ModelDescription& model = source_->model().description;
    SQZ_RETURN_IF_ERROR(IndexBuilder::plan(model, std::ssize(tokens.ids), options).status());
    return find_or_build(model, tokens, target(output, options),
                         [&](const IndexTarget& target) -> Result<BuiltIndex> {
                           SQZ_ASSIGN_OR_RETURN(Runner* const runner,
                                                device.runner(arguments_.source.model));
                           Progress progress(ProgressStyle::kNone, entry.key);
                           return build_from_model(*runner, tokens, target, progress, &device.gate);
                         });
  }

 private:
  Result<FixedTokens> read(const ManifestEntry& entry) {
    const std::lock_guard lock(reading_);
    if (!source_) {
      SQZ_ASSIGN_OR_RETURN(Source opened, Source::open_model(arguments_.source, true));
      SQZ_ASSIGN_OR_RETURN(options_, full_options(arguments_, context_.options,
                                                  opened.model().description, qmodel_));
      options_.chat = opened.chat_json();
      if (!opened.chat()) warn_of_chat_template(arguments_.source.model);
      source_ = std::move(opened);
    }
    SQZ_ASSIGN_OR_RETURN(const Source source, source_->with(entry.texts, entry.tokens));
    return source.tokens(source.documents());
  }

  // One at a time: the HDF5 library is not for several threads.
  Result<Outcome> build_capture(const ManifestEntry& entry, const std::string& output,
                                Device& device) {
    const std::lock_guard lock(captures_);
    SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(entry.capture));
    const CaptureInfo& info = capture->info();
    QmodelFile qmodel;
    SQZ_ASSIGN_OR_RETURN(BuildOptions options,
                         full_options(arguments_, context_.options, info.model, qmodel));
    options.pass.clear();  // not known
    options.gpu = device.gpu;
    SQZ_RETURN_IF_ERROR(check_capture(info, entry.capture, options.tail));
    return find_or_build(info.model, {info.tokens, info.tokenizer_hash}, target(output, options),
                         [&](const IndexTarget& target) {
                           const TokenGate::Turn turn(device.gate, std::ssize(info.tokens));
                           Progress progress(ProgressStyle::kNone, entry.key);
                           return build_from_capture(*capture, target, progress);
                         });
  }

  IndexTarget target(const std::string& output, const BuildOptions& options) const {
    return {output, arguments_.force || arguments_.update, options};
  }

  // What is there, if it is what the build would make; else what build(target) makes. Refuses to
  // replace something else, also what another process has put there in the meantime.
  template <class Build>
  Result<Outcome> find_or_build(const ModelDescription& model, const FixedTokens& tokens,
                                const IndexTarget& target, const Build& build) {
    SQZ_RETURN_IF_ERROR(check_inside(arguments_.output, target.path));
    if (!arguments_.force) {
      SQZ_ASSIGN_OR_RETURN(const auto there, find(model, tokens, target));
      if (there) return *there;
    }
    SQZ_RETURN_IF_ERROR(make_folder(fs::path(target.path).parent_path(), target.path));
    const Result<BuiltIndex> built = build(target);
    if (built.ok()) return Outcome{*built};
    const Status& status = built.status();
    if (status.code() == Code::kExists) {
      SQZ_ASSIGN_OR_RETURN(const auto there, find(model, tokens, target));
      if (there) return *there;
    }
    const bool other_partial = status.code() == Code::kMismatch &&
                               status.message().starts_with(target.path + ".tmp.resume");
    if (!other_partial) return status;
    return Status(status.code(),
                  status.message() + ": pass --update, or remove it with sqz-index corpus gc");
  }

  // Nothing if there is no file, or one that may be replaced.
  static Result<std::optional<Outcome>> find(const ModelDescription& model,
                                             const FixedTokens& tokens, const IndexTarget& target) {
    const auto built = find_built(model, tokens, target);
    if (built.ok()) return std::optional(Outcome{*built, true});
    const Status& status = built.status();
    if (status.code() == Code::kNotFound || target.force) return std::optional<Outcome>();
    if (status.code() == Code::kIo) return status;
    return Status(status.code() == Code::kMismatch ? Code::kExists : status.code(),
                  status.message() + "; pass --update to replace it");
  }

  const BuildArguments& arguments_;
  const ToolContext& context_;
  std::mutex reading_, captures_;
  std::optional<Source> source_;  // of the model, once it was needed; then it does not change
  QmodelFile qmodel_;
  BuildOptions options_;
};

// What becomes of the documents, as they end: counted, said, and kept in the status file.
class Journal {
 public:
  Journal(const BuildArguments& arguments, const ToolContext& context, size_t documents)
      : arguments_(arguments),
        context_(context),
        count_(static_cast<int64_t>(documents)),
        progress_(context.progress_style(), arguments.manifest) {}

  Status open(const Shard& shard) {
    if (arguments_.status.empty()) return {};
    SQZ_ASSIGN_OR_RETURN(file_, StatusFile::open(arguments_.status, shard));
    return {};
  }

  void add(const ManifestEntry& entry, const Result<Outcome>& document, double seconds) {
    const std::lock_guard lock(mutex_);
    JsonMembers fields = {{"key", entry.key},
                          {"line", entry.line},
                          {"path", entry.output(arguments_.output)},
                          {"seconds", seconds}};
    if (!document.ok()) {
      ++failed_;
      spdlog::error("{}: line {}: {}: {}", arguments_.manifest, entry.line, entry.key,
                    document.status().message());
      fields.merge(JsonMembers{{"state", "failed"},
                               {"code", code_name(document.status().code())},
                               {"message", document.status().message()}});
    } else {
      const BuildReport& report = document->index.report;
      ++(document->there ? there_ : built_);
      tokens_ += document->there ? 0 : report.tokens;
      fields.merge(JsonMembers{{"state", document->there ? "there" : "built"},
                               {"tokens", report.tokens},
                               {"bytes", report.bytes},
                               {"build_id", report.build_id}});
    }
    context_.output.event("document", fields);
    if (file_ != nullptr && written_.ok()) {
      written_ = file_->add(fields);
      if (!written_.ok()) spdlog::error("{}; the builds go on", written_.message());
    }
    progress_.update(static_cast<double>(built_ + there_ + failed_) / static_cast<double>(count_));
  }

  Status end(double seconds) {
    const double rate = static_cast<double>(tokens_) / seconds;
    context_.output.result(
        {{"documents", count_},
         {"built", built_},
         {"there", there_},
         {"failed", failed_},
         {"tokens", tokens_},
         {"seconds", seconds}},
        {{"documents", concat(count_)},
         {"built", concat(built_, ", ", tokens_, " tokens, ", fixed_text(rate, 0), " a second")},
         {"there before", concat(there_)},
         {"failed", concat(failed_)}});
    if (failed_ == 0) return written_;
    return {failed_ < count_ ? Code::kIo : Code::kCorrupt,
            concat(arguments_.manifest, ": ", failed_, " of ", count_, " documents failed")};
  }

 private:
  const BuildArguments& arguments_;
  const ToolContext& context_;
  const int64_t count_;
  std::mutex mutex_;
  Progress progress_;
  std::unique_ptr<StatusFile> file_;  // null without --status
  Status written_;
  int64_t built_ = 0, there_ = 0, failed_ = 0, tokens_ = 0;
};

// No index of the corpus takes the place of what one of them is made from.
Status check_outputs(const BuildArguments& arguments, const std::vector<ManifestEntry>& entries) {
  std::vector<std::string> outputs, inputs = files_of(arguments);
  for (const ManifestEntry& entry : entries) {
    outputs.push_back(entry.output(arguments.output));
    inputs.insert(inputs.end(), {entry.tokens, entry.capture});
    inputs.insert(inputs.end(), entry.texts.begin(), entry.texts.end());
  }
  return check_not_inputs(outputs, inputs);
}

}  // namespace

Status build_from_manifest(const BuildArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const Shard shard, parse_shard(arguments.shard));
  SQZ_ASSIGN_OR_RETURN(const auto entries, read_manifest(arguments.manifest, shard));
  SQZ_RETURN_IF_ERROR(check_outputs(arguments, entries));
  SQZ_ASSIGN_OR_RETURN(std::deque<Device> devices, devices_of(arguments, context.options));
  Corpus corpus(arguments, context);
  Journal journal(arguments, context, entries.size());
  SQZ_RETURN_IF_ERROR(journal.open(shard));
  const Stopwatch watch;
  std::atomic<size_t> next{0};
  const auto work = [&](Device& device) {
    for (size_t i; check_stop().ok() && (i = next.fetch_add(1)) < entries.size();) {
      const Stopwatch one;
      const auto document = [&]() -> Result<Outcome> {
        try {
          return corpus.build(entries[i], device);
        } catch (const std::bad_alloc&) {
          return Status(Code::kOutOfMemory, "not enough memory");
        }
      }();
      if (check_stop().ok()) journal.add(entries[i], document, one.seconds());
    }
  };
  const int together = arguments.together > 0 ? arguments.together : context.options.gpu() ? 4 : 2;
  const int lanes = together * static_cast<int>(devices.size());
  SQZ_RETURN_IF_ERROR(parallel_for(lanes, lanes, [&](int64_t lane) {
    work(devices[static_cast<size_t>(lane) % devices.size()]);
    return Status();
  }));
  SQZ_RETURN_IF_ERROR(check_stop());
  return journal.end(watch.seconds());
}

}  // namespace sqz
