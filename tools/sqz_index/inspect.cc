// The commands that only read: info, verify.
#include <spdlog/spdlog.h>

#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "libindex/describe.h"
#include "tools/common/qmodel_table.h"
#include "tools/sqz_index/commands.h"

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

}  // namespace sqz
