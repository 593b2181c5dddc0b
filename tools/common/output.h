// Standard output of a tool: results and nothing else. With --json it is one JSON object a line,
// and the last one is {"event": "result", ...} or {"event": "error", ...}. Without, it is text for
// people. Several threads may write at once.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "formats/base/json.h"
#include "formats/base/status.h"

namespace sqz {

class Output {
 public:
  explicit Output(bool json, bool silent = false) : json_(json), silent_(silent) {}

  bool json() const { return json_; }
  // With --json: one line {"event": KIND, ...fields}. Nothing follows the last line.
  void event(const std::string& kind, const JsonMembers& fields) const;
  // The last line with --json, else an aligned table of rows_of(fields).
  void result(const JsonMembers& fields) const;
  // The last line {"event": "error", "code", "message"}, unless there was a result. A command that
  // fails after its result (verify, of a damaged file) has said why.
  void error(const Status& status) const;
  // Text as it is; nothing with --json.
  void text(const std::string& text) const;

 private:
  void line(const std::string& kind, const JsonMembers& fields, bool last) const;

  bool json_, silent_;  // silent: nothing is written
  mutable std::mutex mutex_;
  mutable bool ended_ = false;  // the last line was written
};

// Flushes standard output. kIo if a write failed, as on a full disk or a closed pipe.
Status finish_stdout();
// The text with control characters as \\x1b, so that a file can neither send commands to a terminal
// nor begin a line.
std::string printable(const std::string& text);
// A table. All lines have as many cells. A column is as wide as its widest cell, and two spaces
// separate columns. The first `left` columns are aligned to the left, the others to the right.
std::string columns_text(const std::vector<std::vector<std::string>>& lines, size_t left);
// Names and values for people: a row for each field, and for each string of an array of strings.
// The members of an object get names with a dot: "calibration.queries".
std::vector<std::pair<std::string, std::string>> rows_of(const JsonMembers& fields);
// "0.125": `digits` digits behind the point.
std::string fixed_text(double value, int digits);

}  // namespace sqz
