// Shows on standard error how much of a long piece of work is done. On a terminal it is a bar that
// is refreshed at most 6 times a second. Elsewhere it is a line every 30 seconds, so that short
// runs print nothing and logs stay readable. The fraction never falls.
#pragma once

#include <optional>
#include <string>

#include "formats/base/stopwatch.h"

namespace sqz {

enum class ProgressStyle { kNone, kBar, kLines };

// `asked` is true for --progress (a bar even without a terminal) and false for --no-progress.
ProgressStyle progress_style(std::optional<bool> asked, bool terminal, bool quiet);

class Progress {
 public:
  Progress(ProgressStyle style, std::string label);
  ~Progress();  // ends the line of the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(double done);  // 0 .. 1; a smaller value than before is ignored
  void finish();             // shows 100 %

 private:
  void show();
  std::string text() const;

  ProgressStyle style_;
  std::string label_;
  Stopwatch watch_;
  double last_shown_ = 0, done_ = 0;  // seconds; a fraction
  bool open_line_ = false;            // a bar is on the terminal, without its newline
};

// "0:07", "12:05", "3:00:00".
std::string duration_text(double seconds);

}  // namespace sqz
