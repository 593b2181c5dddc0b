// The commands that only read: info, verify, status.
#include <spdlog/spdlog.h>

#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "libindex/describe.h"
#include "tools/common/qmodel_table.h"
#include "tools/sqz_index/commands.h"
#include "tools/sqz_index/manifest.h"

namespace sqz {
namespace {

Status run_info(const std::string& path, const ToolContext& context) {
  if (has_kind(path, FileKind::kQmodel)) {
    SQZ_ASSIGN_OR_RETURN(const QmodelFile qmodel, read_qmodel_file(path));
    JsonMembers fields = qmodel_json(qmodel);
    fields.merge(JsonMembers{{"path", path}, {"kind", "qmodel"}, {"model", to_json(qmodel.model)}});
    context.output.result(fields);
    return {};
  }
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  SQZ_ASSIGN_OR_RETURN(JsonMembers fields, describe_index(*file));
  if (!context.output.json()) fields.erase("metadata");  // the same, as the file has it
  context.output.result(fields);
  return {};
}

Status verify(const std::string& path, const ToolContext& context) {
  if (has_kind(path, FileKind::kQmodel)) return read_qmodel_file(path).status();
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  Progress progress(context.progress_style(), "verify");
  const auto show = [&](uint64_t done, uint64_t total) {
    progress.update(total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total));
  };
  return file->verify(show, context.options.threads);
}

Status run_verify(const std::string& path, const ToolContext& context) {
  const Status status = verify(path, context);
  if (!status.ok()) {
    return {status.code(), status.message() + ": make the file again or restore it"};
  }
  context.output.result({{"path", path}, {"ok", true}});
  return {};
}

struct StatusArguments {
  std::string folder, manifest, shard;
};

Status run_status(const StatusArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto entries, read_manifest(arguments.manifest, arguments.shard));
  int64_t done = 0, missing = 0, tokens = 0;
  uint64_t bytes = 0;
  for (const ManifestEntry& entry : entries) {
    const std::string path = entry.output(arguments.folder);
    const auto file = SqzFile::open(path);
    JsonMembers fields = {{"key", entry.key}, {"line", entry.line}, {"path", path}};
    if (file.ok()) {
      ++done;
      tokens += (*file)->metadata().tokens;
      bytes += (*file)->file_bytes();
      fields.merge(JsonMembers{{"state", "done"}});
    } else {
      ++missing;
      context.output.text(printable(file.status().message()) + "\n");
      fields.merge(JsonMembers{{"state", "missing"}, {"message", file.status().message()}});
    }
    context.output.event("document", fields);
  }
  context.output.result(
      {{"done", done}, {"missing", missing}, {"tokens", tokens}, {"bytes", bytes}});
  return {};
}

}  // namespace

void add_info_command(Tool& tool) {
  const auto path = std::make_shared<std::string>();
  CLI::App* app =
      tool.command("info",
                   "Say what an index is: model, context, clusters, build parameters; or a query "
                   "classifier.",
                   "Result: the metadata, decoded, and as the file has it in `metadata`; of a\n"
                   "classifier kind and the result of the tool that made it.\n"
                   "\n"
                   "Examples:\n"
                   "  sqz-index info book.sqz\n"
                   "  sqz-index info book.sqz --json | jq .tokens\n",
                   [path](const ToolContext& context) { return run_info(*path, context); });
  app->add_option("INDEX", *path, "The index or query classifier (.sqz)")->required();
}

void add_verify_command(Tool& tool) {
  const auto path = std::make_shared<std::string>();
  CLI::App* app = tool.command(
      "verify", "Check every checksum and invariant of an index or a query classifier.",
      "Result: path, ok. Exit code 3, and the first problem, if there is one.\n"
      "\n"
      "Example:\n  sqz-index verify book.sqz && echo whole\n",
      [path](const ToolContext& context) { return run_verify(*path, context); });
  app->add_option("INDEX", *path, "The index or query classifier (.sqz)")->required();
}

void add_status_command(Tool& tool) {
  const auto arguments = std::make_shared<StatusArguments>();
  CLI::App* app = tool.command(
      "status", "Say which documents of a manifest have an index.",
      "Opens the index of each document and reads its header: `build --manifest` again finds\n"
      "indexes of other options.\n"
      "\n"
      "Result: done, missing, tokens, bytes, and an event `document` each: key, line,\n"
      "path, state (done or missing), message.\n"
      "\n"
      "Example:\n"
      "  sqz-index status indexes/ --manifest corpus.jsonl\n",
      [arguments](const ToolContext& context) { return run_status(*arguments, context); });
  app->add_option("DIR", arguments->folder, "The folder of the indexes")->required();
  app->add_option("--manifest", arguments->manifest, "The corpus (.jsonl)")->required();
  app->add_option("--shard", arguments->shard, "Part I of N of the manifest, 0 to N - 1")
      ->type_name("I/N");
}

}  // namespace sqz
