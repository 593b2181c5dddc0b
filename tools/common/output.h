// What a tool writes to stdout: results and nothing else. With --json one JSON object a line, the
// last of which is {"event": "result", ...} or {"event": "error", ...}; without, text for people.
// Several threads may say something at once.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

using Rows = std::vector<std::pair<std::string, std::string>>;  // name, value

class Output {
 public:
  explicit Output(bool json) : json_(json) {}

  bool json() const { return json_; }
  // One line {"event": KIND, ...fields}; nothing without --json, nor behind the last line.
  void event(const std::string& kind, const JsonMembers& fields) const;
  // The result: `fields` with --json, else `rows` as an aligned table.
  void result(const JsonMembers& fields, const Rows& rows) const;
  // {"event": "error", "code", "message"}, unless there was a result: a command that fails after it
  // (verify, of a damaged file) has said why.
  void error(const Status& status) const;
  // Text as it is; nothing with --json.
  void text(const std::string& text) const;

 private:
  void line(const std::string& kind, const JsonMembers& fields, bool last) const;

  bool json_;
  mutable std::mutex mutex_;
  mutable bool ended_ = false;  // the last line was written
};

// What was written to stdout is there: kIo after a full disk or a closed pipe.
Status finish_stdout();
// Text for a terminal: control characters as \\x1b, so that a file cannot send the terminal
// commands.
std::string printable(const std::string& text);
// Lines of as many cells each, as text: a column is as wide as its widest cell, two spaces from the
// next; the first `left` columns stand to the left, the others to the right.
std::string columns_text(const std::vector<std::vector<std::string>>& lines, size_t left);
// A row for each member of an object, named PREFIX.KEY; none if it is no object.
Rows member_rows(const std::string& prefix, const JsonText& object);
// Numbers as printf writes them, at most 399 bytes.
[[gnu::format(printf, 1, 2)]] std::string printed(const char* pattern, ...);
// "0.125": so many digits behind the point.
std::string fixed_text(double value, int digits);
// "1.5 MiB", "12 bytes".
std::string bytes_text(double bytes);
// "1.23 s" or "4:05".
std::string seconds_text(double seconds);
// [1, 2, 3] as "1, 2, 3".
std::string list_text(const std::vector<int64_t>& values);

}  // namespace sqz
