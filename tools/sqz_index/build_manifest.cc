#include "tools/sqz_index/build_manifest.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <new>

#include "formats/base/stopwatch.h"
#include "formats/capture.h"
#include "tools/common/load_runner.h"
#include "tools/common/signals.h"
#include "tools/sqz_index/build_index.h"
#include "tools/sqz_index/manifest.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  BuiltIndex index;
  bool there = false;  // before
};

// What the documents share: a model that is opened for the first one that needs it.
class Corpus {
 public:
  Corpus(const BuildArguments& arguments, const ToolContext& context)
      : arguments_(arguments), context_(context) {}

  Result<Outcome> build(const ManifestEntry& entry) {
    const std::string output = entry.output(arguments_.output);
    if (!entry.capture.empty()) return build_capture(entry, output);
    if (!source_) {
      SQZ_ASSIGN_OR_RETURN(source_, Source::open_model(arguments_.source, true));
      SQZ_ASSIGN_OR_RETURN(options_, full_options(arguments_, context_.options,
                                                  source_->model().description, qmodel_));
    }
    SQZ_ASSIGN_OR_RETURN(const Source source, source_->with(entry.texts, entry.tokens));
    SQZ_ASSIGN_OR_RETURN(const FixedTokens tokens, source.tokens(source.documents()));
    const ModelDescription& model = source.model().description;
    const auto count = static_cast<int64_t>(tokens.ids.size());
    SQZ_RETURN_IF_ERROR(IndexBuilder::plan(model, count, options_).status());
    return find_or_build(model, tokens, target(output, options_), [&](const IndexTarget& target) {
      return build_from_tokens(entry, tokens, target);
    });
  }

 private:
  Result<Outcome> build_capture(const ManifestEntry& entry, const std::string& output) {
    SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(entry.capture));
    const CaptureInfo& info = capture->info();
    QmodelFile qmodel;
    SQZ_ASSIGN_OR_RETURN(BuildOptions options,
                         full_options(arguments_, context_.options, info.model, qmodel));
    SQZ_RETURN_IF_ERROR(check_capture(info, entry.capture, options.tail));
    options.pass.clear();  // not known
    return find_or_build(info.model, {info.tokens, info.tokenizer_hash}, target(output, options),
                         [&](const IndexTarget& target) {
                           Progress progress(context_.progress_style(), entry.key);
                           return build_from_capture(*capture, target, progress);
                         });
  }

  Result<BuiltIndex> build_from_tokens(const ManifestEntry& entry, const FixedTokens& tokens,
                                       const IndexTarget& target) {
    if (runner_ == nullptr) {
      SQZ_ASSIGN_OR_RETURN(runner_,
                           load_runner(arguments_.source.model,
                                       runner_options(arguments_.source, context_.options)));
    }
    Progress progress(context_.progress_style(), entry.key);
    return build_from_model(*runner_, tokens, target, progress);
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
    std::error_code error;
    fs::create_directories(fs::path(target.path).parent_path(), error);
    if (error) return Status(Code::kIo, concat(target.path, ": create folder: ", error.message()));
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
    return Status(status.code(), status.message() +
                                     ": pass --update, or remove it with sqz-index "
                                     "corpus gc");
  }

  // Nothing if there is no file, or one that may be replaced.
  static Result<std::optional<Outcome>> find(const ModelDescription& model,
                                             const FixedTokens& tokens, const IndexTarget& target) {
    const auto built = find_built(model, tokens, target);
    if (built.ok()) return std::optional(Outcome{*built, true});
    const Status& status = built.status();
    if (status.code() == Code::kNotFound || target.force) return std::optional<Outcome>();
    return Status(status.code() == Code::kMismatch ? Code::kExists : status.code(),
                  status.message() + "; pass --update to replace it");
  }

  const BuildArguments& arguments_;
  const ToolContext& context_;
  std::optional<Source> source_;
  QmodelFile qmodel_;
  BuildOptions options_;
  std::unique_ptr<Runner> runner_;
};

}  // namespace

Status build_from_manifest(const BuildArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto entries, read_manifest(arguments.manifest, arguments.shard));
  Corpus corpus(arguments, context);
  int64_t built = 0, there = 0, failed = 0;
  for (const ManifestEntry& entry : entries) {
    const Stopwatch watch;
    const auto document = [&]() -> Result<Outcome> {
      try {
        return corpus.build(entry);
      } catch (const std::bad_alloc&) {
        return Status(Code::kOutOfMemory, "not enough memory");
      }
    }();
    SQZ_RETURN_IF_ERROR(check_stop());
    JsonMembers fields = {{"key", entry.key},
                          {"line", entry.line},
                          {"path", entry.output(arguments.output)},
                          {"seconds", watch.seconds()}};
    if (!document.ok()) {
      ++failed;
      spdlog::error("{}: line {}: {}: {}", arguments.manifest, entry.line, entry.key,
                    document.status().message());
      fields.merge(JsonMembers{{"state", "failed"},
                               {"code", code_name(document.status().code())},
                               {"message", document.status().message()}});
    } else {
      ++(document->there ? there : built);
      fields.merge(JsonMembers{{"state", document->there ? "there" : "built"},
                               {"tokens", document->index.report.tokens},
                               {"bytes", document->index.report.bytes}});
    }
    context.output.event("document", fields);
  }
  const auto count = static_cast<int64_t>(entries.size());
  context.output.result(
      {{"documents", count}, {"built", built}, {"there", there}, {"failed", failed}},
      {{"documents", concat(count)},
       {"built", concat(built)},
       {"there before", concat(there)},
       {"failed", concat(failed)}});
  if (failed == 0) return {};
  return {failed < count ? Code::kIo : Code::kCorrupt,
          concat(arguments.manifest, ": ", failed, " of ", count, " documents failed")};
}

}  // namespace sqz
