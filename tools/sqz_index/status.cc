#include "formats/sqz_file.h"
#include "tools/sqz_index/commands.h"
#include "tools/sqz_index/manifest.h"

namespace sqz {
namespace {

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
