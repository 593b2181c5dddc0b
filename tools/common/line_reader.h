// Lines of a terminal or a pipe, for a loop that a signal can end while it waits: std::getline
// waits on. Needs watch_signals().
#pragma once

#include <string>

namespace sqz {

class LineReader {
 public:
  explicit LineReader(int descriptor) : descriptor_(descriptor) {}

  // The next line, without its end. False at the end of the input, where it cannot be read, and
  // within a tenth of a second of stop_requested().
  bool next(std::string& line);
  // Whether next() would not wait long: a line, or the end, is there or has begun to come.
  bool ready() const;

 private:
  int descriptor_;
  std::string buffer_;  // read, and not given out
  bool ended_ = false;
};

}  // namespace sqz
