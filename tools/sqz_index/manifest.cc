#include "tools/sqz_index/manifest.h"

#include <charconv>
#include <filesystem>
#include <map>
#include <span>
#include <sstream>

#include "formats/base/file.h"
#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "tools/common/texts.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

// No way out of the folder, and a name that a file can have.
bool is_key(const std::string& key) {
  if (key.empty() || key.size() > 1000 || key.find('\0') != std::string::npos) return false;
  std::istringstream parts(key + "/");
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty() || part == "." || part == ".." || part.size() > 240) return false;
  }
  return true;
}

Result<ManifestEntry> parse_entry(const std::string& line, const std::string& label,
                                  const fs::path& folder) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json_object(line, label));
  JsonFields fields(json.root(), label);
  const auto resolved = [&](const std::string& path) {
    return path.empty() ? path : (folder / path).string();
  };
  ManifestEntry out;
  out.key = fields.text("key");
  out.tokens = resolved(fields.text("tokens", ""));
  out.capture = resolved(fields.text("capture", ""));
  if (fields.has("texts")) {
    const JsonValue* texts = fields.array("texts");
    for (size_t i = 0; texts != nullptr && i < texts->size(); ++i) {
      if (!(*texts)[i].is_string()) {
        fields.complain("texts", "an array of paths");
      } else {
        out.texts.push_back(resolved(std::string((*texts)[i].string())));
      }
    }
  }
  const int sources = !out.texts.empty() + !out.tokens.empty() + !out.capture.empty();
  if (fields.status().ok() && sources != 1) {
    fields.complain_of("texts, tokens, capture", concat(sources, " of them"), "one of them");
  }
  if (fields.status().ok() && !is_key(out.key)) {
    fields.complain("key", "names with / between them, and none is . or ..");
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

struct Shard {
  uint64_t index = 0, count = 1;

  bool holds(const std::string& key) const {
    return xxh3_64(std::as_bytes(std::span(key))) % count == index;
  }
};

Result<Shard> parse_shard(const std::string& text) {
  Shard out;
  if (text.empty()) return out;
  const char* const end = text.data() + text.size();
  const auto index = std::from_chars(text.data(), end, out.index);
  if (index.ec == std::errc() && index.ptr != end && *index.ptr == '/') {
    const auto count = std::from_chars(index.ptr + 1, end, out.count);
    if (count.ec == std::errc() && count.ptr == end && out.index < out.count) return out;
  }
  return Status(Code::kInvalidArgument,
                concat("--shard: found ", text, ", expected I/N, with I from 0 to N - 1"));
}

}  // namespace

std::string ManifestEntry::output(const std::string& folder) const {
  return (fs::path(folder) / (key + ".sqz")).string();
}

Result<std::vector<ManifestEntry>> read_manifest(const std::string& path,
                                                 const std::string& shard_text) {
  SQZ_ASSIGN_OR_RETURN(const Shard shard, parse_shard(shard_text));
  std::vector<ManifestEntry> out;
  std::map<std::string, int64_t> lines;  // by key
  SQZ_RETURN_IF_ERROR(each_line(
      Env::posix(), path, [&](const std::string& line, int64_t number, const std::string& label) {
        SQZ_ASSIGN_OR_RETURN(ManifestEntry entry,
                             parse_entry(line, label, fs::path(path).parent_path()));
        entry.line = number;
        const auto [at, is_new] = lines.emplace(entry.key, number);
        if (!is_new) {
          return Status(
              Code::kCorrupt,
              bad_field(label, "key", concat("'", entry.key, "' of line ", at->second, " again"),
                        "every key once"));
        }
        if (shard.holds(entry.key)) out.push_back(std::move(entry));
        return Status();
      }));
  if (!lines.empty()) return out;
  return Status(Code::kCorrupt, bad_field(path, "documents", "none", "at least one, one a line"));
}

}  // namespace sqz
