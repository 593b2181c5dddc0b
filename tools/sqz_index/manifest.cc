#include "tools/sqz_index/manifest.h"

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <span>
#include <sstream>

#include "formats/base/file.h"
#include "formats/base/hash.h"
#include "formats/json_fields.h"

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
    fields.complain("key", "names with / between them, none of them . or ..");
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

Result<int64_t> parse_number(const std::string& text, const std::string& what) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 0) return value;
  return Status(Code::kInvalidArgument, bad_field("--shard", what, "'" + text + "'", "a number"));
}

// The first of the environment's variables that is set.
Result<int64_t> number_of(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* value = std::getenv(name)) return parse_number(value, name);
  }
  return Status(Code::kInvalidArgument,
                concat("--shard auto: ", *names.begin(), " is not set: pass I/N"));
}

}  // namespace

std::string ManifestEntry::output(const std::string& folder) const {
  return (fs::path(folder) / (key + ".sqz")).string();
}

Result<std::vector<ManifestEntry>> read_manifest(const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(Env::posix(), path));
  std::vector<ManifestEntry> out;
  std::map<std::string, int64_t> lines;  // by key
  std::istringstream stream(text);
  int64_t number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    const std::string label = concat(path, ": line ", number);
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
    out.push_back(std::move(entry));
  }
  if (!out.empty()) return out;
  return Status(Code::kCorrupt, bad_field(path, "documents", "none", "at least one, one a line"));
}

bool Shard::holds(const std::string& key) const {
  const uint64_t hash = xxh3_64(std::as_bytes(std::span(key)));
  return hash % static_cast<uint64_t>(count) == static_cast<uint64_t>(index);
}

Result<Shard> parse_shard(const std::string& text) {
  Shard out;
  if (text.empty()) return out;
  const size_t slash = text.find('/');
  const std::string index = text.substr(0, slash);
  if (index == "auto") {
    SQZ_ASSIGN_OR_RETURN(out.index, number_of({"SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"}));
    if (const char* least = std::getenv("SLURM_ARRAY_TASK_MIN")) {
      SQZ_ASSIGN_OR_RETURN(const int64_t first, parse_number(least, "SLURM_ARRAY_TASK_MIN"));
      out.index -= first;
    }
  } else {
    SQZ_ASSIGN_OR_RETURN(out.index, parse_number(index, "I of I/N"));
  }
  if (slash != std::string::npos) {
    SQZ_ASSIGN_OR_RETURN(out.count, parse_number(text.substr(slash + 1), "N of I/N"));
  } else if (index == "auto") {
    SQZ_ASSIGN_OR_RETURN(out.count, number_of({"SLURM_ARRAY_TASK_COUNT"}));
  } else {
    return Status(Code::kInvalidArgument, "--shard: found '" + text + "', expected I/N or auto");
  }
  if (out.index >= 0 && out.index < out.count) return out;
  return Status(Code::kInvalidArgument,
                bad_field("--shard", "I", concat(out.index), concat("0 to ", out.count - 1)));
}

}  // namespace sqz
