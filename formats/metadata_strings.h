// The strings of "__metadata__" in a .sqz file, each decoded from its JSON text when it is asked
// for. As JsonFields, it keeps the first complaint and returns harmless values from then on.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

class MetadataStrings {
 public:
  // `path` names the file in messages. `strings` is borrowed.
  MetadataStrings(const std::map<std::string, std::string>& strings, const std::string& path);

  bool has(const char* key) const;
  std::string string(const char* key);
  JsonDocument json(const char* key);
  // In [low, high].
  int64_t integer(const char* key, int64_t low, int64_t high);
  double number(const char* key, double low, double high);
  bool boolean(const char* key);

  void fail(std::string message);            // kCorrupt, if nothing failed before
  std::string label(const char* key) const;  // "FILE: __metadata__: KEY"
  const Status& status() const { return status_; }

 private:
  const std::map<std::string, std::string>& strings_;
  std::string label_;
  Status status_;
};

// What the logits of a query classifier tell, in files that hold one: the attention to a key of a
// bucket (formats/qmodel_file.h). Earlier files say nothing of it; theirs were of whole buckets.
inline constexpr const char* kLogitsKey = "logits";
inline constexpr const char* kLogitsOfKeys = "key";
// in.fail() for others, with `remedy`.
void check_logits(MetadataStrings& in, const char* remedy);

// 16 lower-case hexadecimal digits, as XXH3-64 is written.
bool is_hash(const std::string& text);

}  // namespace sqz
