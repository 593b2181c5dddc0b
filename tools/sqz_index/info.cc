#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "tools/common/index_table.h"
#include "tools/common/qmodel_table.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

Status run_info(const std::string& path, const ToolContext& context) {
  if (has_kind(path, FileKind::kQmodel)) {
    SQZ_ASSIGN_OR_RETURN(const QmodelFile qmodel, read_qmodel_file(path));
    JsonMembers fields = qmodel_json(qmodel);
    fields.merge(JsonMembers{{"path", path}, {"kind", "qmodel"}, {"model", to_json(qmodel.model)}});
    Rows rows = {{"query classifier", path}};
    for (auto& row : qmodel_rows(qmodel)) rows.push_back(std::move(row));
    context.output.result(fields, rows);
    return {};
  }
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  SQZ_ASSIGN_OR_RETURN(const Calibration calibration, file->calibration());
  context.output.result(index_json(*file, calibration), index_rows(*file, calibration));
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

}  // namespace sqz
