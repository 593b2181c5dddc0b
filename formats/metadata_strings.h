// The strings of "__metadata__" in a .sqz file, each decoded from its JSON text when it is asked
// for. As JsonFields, it keeps the first complaint and returns harmless values from then on.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "formats/base/json.h"
#include "formats/base/status.h"
#include "formats/sqz_container.h"

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
  bool flag(const char* key) { return has(key) && boolean(key); }  // absent: false
  // out = from_json(the value of `key`, its label), which is a Result; not after a complaint.
  template <class T, class Parse>
  void parse(const char* key, T& out, Parse from_json) {
    const JsonDocument found = json(key);
    if (!status_.ok()) return;
    auto result = from_json(found.root(), label(key));
    if (result.ok()) {
      out = *std::move(result);
    } else {
      status_ = result.status();
    }
  }

  // Keeps a complaint (kCorrupt), if none is kept yet.
  void fail(const char* key, const std::string& found, const std::string& expected);
  std::string label(const char* key) const;  // "FILE: __metadata__: KEY"
  const Status& status() const { return status_; }

 private:
  const std::map<std::string, std::string>& strings_;
  std::string label_;
  Status status_;
};

// A file with a query classifier says what its logits stand for: the attention to one key of a
// bucket (formats/qmodel_file.h). Earlier files do not have the key; their logits stood for whole
// buckets.
inline constexpr const char* kLogitsKey = "logits";
inline constexpr const char* kLogitsOfKeys = "key";
// Calls in.fail(), with `remedy`, for other logits.
void check_logits(MetadataStrings& in, const char* remedy);

void read_origin(MetadataStrings& in, FileOrigin& origin);

// 16 lower-case hexadecimal digits, as XXH3-64 is written; a tokenizer's may be empty.
bool is_hash(const std::string& text);
Status check_tokenizer_hash(const Refuse& refuse, const std::string& hash);
// `which` says more of the range.
Status check_range(const Refuse& refuse, const char* field, int64_t value, int64_t low,
                   int64_t high, const char* which = "");

}  // namespace sqz
