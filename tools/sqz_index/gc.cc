#include "formats/base/file.h"
#include "tools/sqz_index/commands.h"

namespace sqz {
namespace {

struct GcArguments {
  std::string folder;
  bool dry_run = false;
};

}  // namespace

void print_leftovers(const std::vector<std::string>& files, bool removed,
                     const ToolContext& context) {
  Rows rows;
  for (const std::string& path : files) rows.emplace_back(removed ? "removed" : "left over", path);
  if (rows.empty()) rows.emplace_back("left over", "nothing");
  context.output.result({{"files", files}, {"removed", removed}}, rows);
}

namespace {

Status run_gc(const GcArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const auto leftovers, find_leftovers(arguments.folder, !arguments.dry_run));
  print_leftovers(leftovers, !arguments.dry_run, context);
  return {};
}

}  // namespace

void add_gc_command(Tool& tool) {
  const auto arguments = std::make_shared<GcArguments>();
  CLI::App* app = tool.command(
      "gc", "Remove what killed builds left in a folder.",
      "Takes files named OUTPUT.tmp.PROCESS.* whose process is dead, and OUTPUT.tmp.resume that "
      "no\n"
      "build is writing: build --resume then begins anew. Folders below are not looked into.\n"
      "\n"
      "Result: files[], removed.\n"
      "\n"
      "Example:\n  sqz-index gc indexes/ --dry-run\n",
      [arguments](const ToolContext& context) { return run_gc(*arguments, context); });
  app->add_option("DIR", arguments->folder, "The folder")->required();
  app->add_flag("--dry-run", arguments->dry_run, "Name them only");
}

}  // namespace sqz
