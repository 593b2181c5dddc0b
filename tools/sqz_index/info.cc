#include "formats/layers_file.h"
#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "tools/common/index_table.h"
#include "tools/common/layers_table.h"
#include "tools/common/qmodel_table.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

// Of a file that is no index: what its own tool says of it, with its path, kind and model.
void print_file(const std::string& path, const char* kind, const char* title,
                const ModelDescription& model, JsonMembers fields, const Rows& more,
                const ToolContext& context) {
  fields.merge(JsonMembers{{"path", path}, {"kind", kind}, {"model", to_json(model)}});
  Rows rows = {{title, path}};
  rows.insert(rows.end(), more.begin(), more.end());
  context.output.result(fields, rows);
}

Status run_info(const std::string& path, const ToolContext& context) {
  if (has_kind(path, FileKind::kLayers)) {
    SQZ_ASSIGN_OR_RETURN(const LayersFile layers, read_layers_file(path));
    context.output.text(layers_table(layers) + "\n");
    print_file(path, "layers", "layer profile", layers.model, layers_json(layers),
               layers_rows(layers), context);
    return {};
  }
  if (has_kind(path, FileKind::kQmodel)) {
    SQZ_ASSIGN_OR_RETURN(const QmodelFile qmodel, read_qmodel_file(path));
    print_file(path, "qmodel", "query classifier", qmodel.model, qmodel_json(qmodel),
               qmodel_rows(qmodel), context);
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
                   "Say what an index is: model, context, clusters, build parameters; or a layer "
                   "profile: cosines, groups, budgets; or a query classifier.",
                   "Result: the metadata, decoded, and as the file has it in `metadata`; of a\n"
                   "profile or classifier kind and the result of the tool that made it.\n"
                   "\n"
                   "Examples:\n"
                   "  sqz-index info book.sqz\n"
                   "  sqz-index info book.sqz --json | jq .tokens\n"
                   "  sqz-index info layers.sqz\n",
                   [path](const ToolContext& context) { return run_info(*path, context); });
  app->add_option("INDEX", *path, "The index, layer profile or query classifier (.sqz)")
      ->required();
}

}  // namespace sqz
