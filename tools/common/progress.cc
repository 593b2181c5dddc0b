#include "tools/common/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "formats/base/status.h"

namespace sqz {
namespace {

constexpr double kBarInterval = 1.0 / 6;
constexpr double kLineInterval = 30;
constexpr int kBarWidth = 30;
constexpr double kShortestForEta = 1;  // seconds: before that an estimate is noise

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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

Progress::Progress(ProgressStyle style, std::string label)
    : Progress(style, std::move(label), write_stderr, steady_seconds) {}

Progress::Progress(ProgressStyle style, std::string label, Write write, Clock clock)
    : style_(style), label_(std::move(label)), write_(std::move(write)), clock_(std::move(clock)) {
  start_ = clock_();
  // The first bar is due at once, the first line after a full interval.
  last_shown_ = style_ == ProgressStyle::kBar ? start_ - kBarInterval : start_;
}

Progress::~Progress() {
  if (open_line_) write_("\n");
}

void Progress::update(double done) {
  done_ = std::clamp(done, done_, 1.0);
  if (style_ == ProgressStyle::kNone) return;
  const double now = clock_();
  const double interval = style_ == ProgressStyle::kBar ? kBarInterval : kLineInterval;
  if (now - last_shown_ >= interval) show(now);
}

void Progress::finish() {
  done_ = 1;
  if (style_ == ProgressStyle::kBar) show(clock_());
  if (open_line_) write_("\n");
  open_line_ = false;
}

void Progress::show(double now) {
  last_shown_ = now;
  const std::string line = text(now);
  if (style_ == ProgressStyle::kLines) return write_(line + "\n");
  // "\x1b[K" clears what a longer text before left behind.
  write_(concat("\r", line, "\x1b[K"));
  open_line_ = true;
}

std::string Progress::text(double now) const {
  const int percent = static_cast<int>(std::floor(done_ * 100));
  std::string out = label_ + " ";
  if (style_ == ProgressStyle::kBar) {
    const auto filled = static_cast<size_t>(std::floor(done_ * kBarWidth));
    out += concat("[", std::string(filled, '#'), std::string(kBarWidth - filled, '.'), "] ");
  }
  out += concat(percent < 10 ? "  " : percent < 100 ? " " : "", percent, " %");
  const double elapsed = now - start_;
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
