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
      options_.chat = source_->chat_json();
      if (!source_->chat()) warn_of_chat_template(arguments_.source.model);
    }
    SQZ_ASSIGN_OR_RETURN(const Source source, source_->with(entry.texts, entry.tokens));
    SQZ_ASSIGN_OR_RETURN(const FixedTokens tokens, source.tokens(source.documents()));
    const ModelDescription& model = source.model().description;
    const auto count = static_cast<int64_t>(tokens.ids.size());
    SQZ_RETURN_IF_ERROR(IndexBuilder::plan(model, count, options_).status());
    SQZ_ASSIGN_OR_RETURN(const auto there, find(output, model, tokens, options_));
    if (there) return *there;
    if (runner_ == nullptr) {
      SQZ_ASSIGN_OR_RETURN(runner_,
                           load_runner(arguments_.source.model,
                                       runner_options(arguments_.source, context_.options)));
    }
    Progress progress(context_.progress_style(), entry.key);
    Outcome out;
    SQZ_ASSIGN_OR_RETURN(out.index,
                         build_from_model(*runner_, tokens, {output, true, options_}, progress));
    return out;
  }

 private:
  Result<Outcome> build_capture(const ManifestEntry& entry, const std::string& output) {
    SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(entry.capture));
    const CaptureInfo& info = capture->info();
    QmodelFile qmodel;
    SQZ_ASSIGN_OR_RETURN(const BuildOptions options,
                         full_options(arguments_, context_.options, info.model, qmodel));
    SQZ_RETURN_IF_ERROR(check_capture(info, entry.capture, options.tail));
    SQZ_ASSIGN_OR_RETURN(const auto there,
                         find(output, info.model, {info.tokens, info.tokenizer_hash}, options));
    if (there) return *there;
    Progress progress(context_.progress_style(), entry.key);
    Outcome out;
    SQZ_ASSIGN_OR_RETURN(out.index,
                         build_from_capture(*capture, {output, true, options}, progress));
    return out;
  }

  // What is at `output`, if it is what the build would make. Refuses to replace something else.
  Result<std::optional<Outcome>> find(const std::string& output, const ModelDescription& model,
                                      const FixedTokens& tokens, BuildOptions options) {
    options.resume = true;  // look at what is there
    const auto built = find_built(model, tokens, {output, arguments_.force, options});
    if (built) return std::optional(Outcome{*built, true});
    if (!arguments_.force && !arguments_.update && Env::posix().exists(output)) {
      return Status(Code::kExists, output +
                                       ": it is of other tokens, another model or other "
                                       "options: pass --update to replace it");
    }
    std::error_code error;
    fs::create_directories(fs::path(output).parent_path(), error);
    if (error) return Status(Code::kIo, concat(output, ": create folder: ", error.message()));
    return std::optional<Outcome>();
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
  SQZ_ASSIGN_OR_RETURN(std::vector<ManifestEntry> entries, read_manifest(arguments.manifest));
  SQZ_ASSIGN_OR_RETURN(const Shard shard, parse_shard(arguments.shard));
  std::erase_if(entries, [&](const ManifestEntry& entry) { return !shard.holds(entry.key); });
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
