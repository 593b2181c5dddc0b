#include "tools/common/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "formats/base/status.h"

namespace sqz {
namespace {

constexpr double kBarInterval = 1.0 / 6;
constexpr double kLineInterval = 30;
constexpr int kBarWidth = 30;
constexpr double kShortestForEta = 1;  // seconds: before that an estimate is noise

void write_stderr(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

ProgressStyle progress_style(std::optional<bool> asked, bool terminal, bool quiet) {
  if (asked) return *asked ? ProgressStyle::kBar : ProgressStyle::kNone;
  if (quiet) return ProgressStyle::kNone;
  return terminal ? ProgressStyle::kBar : ProgressStyle::kLines;
}

// The first bar is due at once, the first line after a full interval.
Progress::Progress(ProgressStyle style, std::string label)
    : style_(style),
      label_(std::move(label)),
      last_shown_(style == ProgressStyle::kBar ? -kBarInterval : 0) {}

Progress::~Progress() {
  if (open_line_) write_stderr("\n");
}

void Progress::update(double done) {
  done_ = std::clamp(done, done_, 1.0);
  const double interval = style_ == ProgressStyle::kBar ? kBarInterval : kLineInterval;
  if (style_ != ProgressStyle::kNone && watch_.seconds() - last_shown_ >= interval) show();
}

void Progress::finish() {
  done_ = 1;
  if (style_ == ProgressStyle::kBar) show();
  if (open_line_) write_stderr("\n");
  open_line_ = false;
}

void Progress::show() {
  last_shown_ = watch_.seconds();
  if (style_ == ProgressStyle::kLines) return write_stderr(text() + "\n");
  // "\x1b[K" clears what a longer text before left behind.
  write_stderr(concat("\r", text(), "\x1b[K"));
  open_line_ = true;
}

std::string Progress::text() const {
  std::string out = label_ + " ";
  if (style_ == ProgressStyle::kBar) {
    const auto filled = static_cast<size_t>(done_ * kBarWidth);
    out += concat("[", std::string(filled, '#'), std::string(kBarWidth - filled, '.'), "] ");
  }
  out += concat(static_cast<int>(done_ * 100), " %");
  const double elapsed = last_shown_;
  if (done_ >= 1) return concat(out, ", ", duration_text(elapsed));
  if (done_ <= 0 || elapsed < kShortestForEta) return out;
  return concat(out, ", ", duration_text(elapsed * (1 - done_) / done_), " left");
}

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::max(seconds, 0.0)));
  const int64_t hours = total / 3600, minutes = total / 60 % 60, rest = total % 60;
  const auto two = [](int64_t n) { return concat(n < 10 ? "0" : "", n); };
  if (hours > 0) return concat(hours, ":", two(minutes), ":", two(rest));
  return concat(minutes, ":", two(rest));
}

}  // namespace sqz
