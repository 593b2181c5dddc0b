#include <filesystem>
#include <set>

#include "formats/sqz_file.h"
#include "tools/sqz_index/commands.h"
#include "tools/sqz_index/manifest.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

struct CorpusArguments {
  std::string action, folder, manifest, shard;
};

// As a line of a manifest, for any folder.
JsonText line_of(const ManifestEntry& entry) {
  const auto absolute = [](const std::string& path) { return fs::absolute(path).string(); };
  JsonMembers out = {{"key", entry.key}};
  if (!entry.tokens.empty()) out.merge(JsonMembers{{"tokens", absolute(entry.tokens)}});
  if (!entry.capture.empty()) out.merge(JsonMembers{{"capture", absolute(entry.capture)}});
  if (entry.texts.empty()) return out;
  std::vector<std::string> texts;
  for (const std::string& text : entry.texts) texts.push_back(absolute(text));
  out.merge(JsonMembers{{"texts", texts}});
  return out;
}

Status remove_leftovers(const std::vector<ManifestEntry>& entries, const std::string& folder,
                        const ToolContext& context) {
  std::set<std::string> folders;
  for (const ManifestEntry& entry : entries) {
    const std::string parent = fs::path(entry.output(folder)).parent_path().string();
    SQZ_RETURN_IF_ERROR(check_inside(folder, parent));
    folders.insert(parent);
  }
  std::vector<std::string> removed;
  for (const std::string& one : folders) {
    if (!fs::is_directory(one)) continue;
    SQZ_ASSIGN_OR_RETURN(const auto found, find_leftovers(one, true));
    removed.insert(removed.end(), found.begin(), found.end());
  }
  print_leftovers(removed, true, context);
  return {};
}

Status run_corpus(const CorpusArguments& arguments, const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const Shard shard, parse_shard(arguments.shard));
  SQZ_ASSIGN_OR_RETURN(const auto entries, read_manifest(arguments.manifest, shard));
  if (arguments.action == "gc") return remove_leftovers(entries, arguments.folder, context);
  int64_t done = 0, missing = 0, tokens = 0;
  uint64_t bytes = 0;
  std::string lines;
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
      lines += line_of(entry).str() + "\n";
      fields.merge(JsonMembers{{"state", "missing"}, {"message", file.status().message()}});
    }
    context.output.event("document", fields);
  }
  if (arguments.action == "missing") {
    context.output.text(lines);
    if (!context.output.json()) return {};
  }
  context.output.result(
      {{"done", done}, {"missing", missing}, {"tokens", tokens}, {"bytes", bytes}},
      {{"done", concat(done)},
       {"missing", concat(missing)},
       {"tokens", concat(tokens)},
       {"size", bytes_text(static_cast<double>(bytes))}});
  return {};
}

}  // namespace

void add_corpus_command(Tool& tool) {
  const auto arguments = std::make_shared<CorpusArguments>();
  CLI::App* app = tool.command(
      "corpus", "What of a manifest is built: status, missing or gc.",
      "status counts the indexes in DIR that open; missing prints the other documents as\n"
      "a manifest, to run again; gc removes what killed builds left. Nothing is read but\n"
      "headers: the same build --manifest again finds what is of other options.\n"
      "\n"
      "Result: done, missing, tokens, bytes, and an event `document` each: key, line,\n"
      "path, state (done or missing), message; of gc: files[].\n"
      "\n"
      "Examples:\n"
      "  sqz-index corpus status indexes/ --manifest corpus.jsonl\n"
      "  sqz-index corpus missing indexes/ --manifest corpus.jsonl > again.jsonl\n",
      [arguments](const ToolContext& context) { return run_corpus(*arguments, context); });
  app->add_option("ACTION", arguments->action, "status, missing or gc")
      ->required()
      ->check(CLI::IsMember({"status", "missing", "gc"}).description(""));
  app->add_option("DIR", arguments->folder, "The folder of the indexes")->required();
  app->add_option("--manifest", arguments->manifest, "The corpus (.jsonl)")->required();
  app->add_option("--shard", arguments->shard, "Part I of N of the manifest, or auto")
      ->type_name("I/N");
}

}  // namespace sqz
