#include <spdlog/spdlog.h>

#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

Result<VerifyReport> check(const std::string& path, const ToolContext& context) {
  if (has_kind(path, FileKind::kQmodel)) return verify_qmodel_file(path);
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  Progress progress(context.progress_style(), "verify");
  const auto show = [&](uint64_t done, uint64_t total) {
    progress.update(total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total));
  };
  SQZ_ASSIGN_OR_RETURN(VerifyReport report, file->verify(show, context.options.threads));
  progress.finish();
  return report;
}

Status run_verify(const std::string& path, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const VerifyReport report, check(path, context));
  const bool whole = report.problems.empty();
  context.output.result(
      {{"path", path}, {"ok", whole}, {"checked", report.checked}, {"problems", report.problems}});
  if (whole) return {};
  return {Code::kCorrupt, concat(path, ": ", report.problems.size(),
                                 " problems; make the file again or restore it")};
}

}  // namespace

void add_verify_command(Tool& tool) {
  const auto path = std::make_shared<std::string>();
  CLI::App* app = tool.command(
      "verify", "Check every checksum and invariant of an index or a query classifier.",
      "Result: path, ok, checked, problems[]. Exit code 3 if there is a problem.\n"
      "\n"
      "Example:\n  sqz-index verify book.sqz && echo whole\n",
      [path](const ToolContext& context) { return run_verify(*path, context); });
  app->add_option("INDEX", *path, "The index or query classifier (.sqz)")->required();
}

}  // namespace sqz
