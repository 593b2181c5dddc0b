// Shows on standard error how much of a long piece of work is done. On a terminal it is a bar that
// is refreshed at most 6 times a second. Elsewhere it is a line every 30 seconds, so that short
// runs print nothing and logs stay readable. The fraction never falls.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace sqz {

enum class ProgressStyle { kNone, kBar, kLines };

// `asked` is true for --progress (a bar even without a terminal) and false for --no-progress.
ProgressStyle progress_style(std::optional<bool> asked, bool terminal, bool quiet);

class Progress {
 public:
  using Write = std::function<void(const std::string&)>;
  using Clock = std::function<double()>;  // seconds, from any origin

  Progress(ProgressStyle style, std::string label);  // stderr and the steady clock
  Progress(ProgressStyle style, std::string label, Write write, Clock clock);
  ~Progress();  // ends the line of the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(double done);  // 0 .. 1; a smaller value than before is ignored
  void finish();             // shows 100 %

 private:
  void show(double now);
  std::string text(double now) const;

  ProgressStyle style_;
  std::string label_;
  Write write_;
  Clock clock_;
  double start_ = 0, last_shown_ = 0, done_ = 0;
  bool open_line_ = false;  // a bar is on the terminal, without its newline
};

// "0:07", "12:05", "3:00:00".
std::string duration_text(double seconds);

}  // namespace sqz
