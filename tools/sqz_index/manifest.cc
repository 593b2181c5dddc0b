#include "tools/sqz_index/manifest.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <sstream>

#include "formats/base/file.h"
#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "tools/common/texts.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // one behind the other, as the kernel has it

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

// A variable of the environment that holds a number; nothing if it is not set.
Result<std::optional<int64_t>> variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) return std::optional<int64_t>();
  SQZ_ASSIGN_OR_RETURN(const int64_t number, parse_number(value, name));
  return std::optional(number);
}

// The tasks of the Slurm array that this process is one of. They are taken for all there are only
// if they are 0, 1, ... N - 1, and more than one: any others may be some of a larger array that
// were submitted again.
Result<int64_t> slurm_tasks() {
  SQZ_ASSIGN_OR_RETURN(const auto count, variable("SLURM_ARRAY_TASK_COUNT"));
  SQZ_ASSIGN_OR_RETURN(const auto least, variable("SLURM_ARRAY_TASK_MIN"));
  SQZ_ASSIGN_OR_RETURN(const auto most, variable("SLURM_ARRAY_TASK_MAX"));
  if (!count || !least || !most) {
    return Status(Code::kInvalidArgument,
                  "--shard auto: SLURM_ARRAY_TASK_COUNT, _MIN and _MAX are not all set: pass "
                  "auto/N, where N is the number of shards");
  }
  if (*count > 1 && *least == 0 && *most == *count - 1) return *count;
  return Status(
      Code::kInvalidArgument,
      concat("--shard auto: found an array of ", *count, *count == 1 ? " task" : " tasks", " from ",
             *least, " to ", *most,
             ", which does not say how many shards there are: pass auto/N, where N is that number "
             "and the tasks are some of 0 to N - 1"));
}

}  // namespace

std::string ManifestEntry::output(const std::string& folder) const {
  return (fs::path(folder) / (key + ".sqz")).string();
}

Result<std::vector<ManifestEntry>> read_manifest(const std::string& path, const Shard& shard) {
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

Status check_inside(const std::string& folder, const std::string& output) {
  std::error_code error;
  fs::path end = fs::absolute(output);
  // weakly_canonical() leaves a link to what is not there as it is.
  for (int links = 0; links < kMostLinks && fs::is_symlink(end, error); ++links)
    end = end.parent_path() / fs::read_symlink(end, error);
  fs::path whole = fs::weakly_canonical(fs::absolute(folder), error);
  if (!whole.has_filename()) whole = whole.parent_path();  // of "folder/" that is not there
  end = fs::weakly_canonical(end, error);
  const auto [in, at] = std::mismatch(whole.begin(), whole.end(), end.begin(), end.end());
  if (!error && in == whole.end()) return {};
  return {Code::kInvalidArgument,
          error ? concat(output, ": ", error.message())
                : bad_field(output, "link", end.string(), concat("a place inside ", folder))};
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
  const bool has_count = slash != std::string::npos;
  if (!has_count && index != "auto") {
    return Status(Code::kInvalidArgument, "--shard: found '" + text + "', expected I/N or auto");
  }
  if (has_count) {
    SQZ_ASSIGN_OR_RETURN(out.count, parse_number(text.substr(slash + 1), "N of I/N"));
  }
  if (index == "auto") {
    SQZ_ASSIGN_OR_RETURN(const auto slurm, variable("SLURM_ARRAY_TASK_ID"));
    SQZ_ASSIGN_OR_RETURN(const auto job, variable("JOB_COMPLETION_INDEX"));
    if (!slurm && !(job && has_count)) {
      return Status(Code::kInvalidArgument,
                    job ? "--shard auto: a Kubernetes Job does not say how many pods it has: pass "
                          "auto/N"
                        : "--shard auto: SLURM_ARRAY_TASK_ID is not set: pass I/N");
    }
    out.index = slurm ? *slurm : *job;
    if (!has_count) {
      SQZ_ASSIGN_OR_RETURN(out.count, slurm_tasks());
    }
  } else {
    SQZ_ASSIGN_OR_RETURN(out.index, parse_number(index, "I of I/N"));
  }
  if (out.index < out.count) return out;
  return Status(Code::kInvalidArgument,
                bad_field("--shard", "I", concat(out.index), concat("0 to ", out.count - 1)));
}

}  // namespace sqz
