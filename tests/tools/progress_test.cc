#include "tools/common/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A clock that the test moves, and everything that was written.
struct Fake {
  double now = 1000;
  std::vector<std::string> written;

  Progress::Write write() {
    return [this](const std::string& text) { written.push_back(text); };
  }
  Progress::Clock clock() {
    return [this] { return now; };
  }
};

int percent(const std::string& text) {
  const size_t end = text.find(" %");
  return std::stoi(text.substr(text.find_last_not_of("0123456789", end - 1) + 1));
}

TEST(ProgressTest, StyleFollowsTheOptionsThenTheTerminal) {
  EXPECT_EQ(progress_style({}, true, false), ProgressStyle::kBar);
  EXPECT_EQ(progress_style({}, false, false), ProgressStyle::kLines);
  EXPECT_EQ(progress_style({}, true, true), ProgressStyle::kNone);
  EXPECT_EQ(progress_style(true, false, true), ProgressStyle::kBar);
  EXPECT_EQ(progress_style(false, true, false), ProgressStyle::kNone);
}

TEST(ProgressTest, BarIsRefreshedAtMostSixTimesASecond) {
  Fake fake;
  {
    Progress progress(ProgressStyle::kBar, "build", fake.write(), fake.clock());
    for (int i = 0; i < 1000; ++i) {
      fake.now += 0.01;  // 10 seconds
      progress.update(i / 2000.0);
    }
  }
  EXPECT_LE(fake.written.size(), 62u);  // 6 a second, and the last newline
  EXPECT_GE(fake.written.size(), 40u);
  EXPECT_EQ(fake.written.back(), "\n");
}

TEST(ProgressTest, TheFractionNeverFalls) {
  Fake fake;
  Progress progress(ProgressStyle::kBar, "build", fake.write(), fake.clock());
  for (const double done : {0.1, 0.5, 0.3, 0.0, 0.6, -1.0, 2.0}) {
    fake.now += 1;
    progress.update(done);
  }
  progress.finish();
  int last = 0;
  for (const std::string& text : fake.written) {
    if (text == "\n") continue;
    EXPECT_GE(percent(text), last) << text;
    last = percent(text);
  }
  EXPECT_EQ(last, 100);
}

TEST(ProgressTest, SaysWhatIsLeft) {
  Fake fake;
  Progress progress(ProgressStyle::kBar, "build", fake.write(), fake.clock());
  fake.now += 30;
  progress.update(0.25);  // 30 s for a quarter: 90 s for the rest
  EXPECT_THAT(fake.written.back(), HasSubstr(" 25 %"));
  EXPECT_THAT(fake.written.back(), HasSubstr("1:30 left"));
  EXPECT_THAT(fake.written.back(), HasSubstr("build [#######......"));
}

TEST(ProgressTest, WithoutATerminalOneLineEveryThirtySeconds) {
  Fake fake;
  Progress progress(ProgressStyle::kLines, "build", fake.write(), fake.clock());
  for (int second = 1; second < 30; ++second) {
    fake.now += 1;
    progress.update(second / 100.0);
  }
  EXPECT_THAT(fake.written, IsEmpty());
  for (int second = 30; second <= 95; ++second) {
    fake.now += 1;
    progress.update(second / 100.0);
  }
  EXPECT_THAT(fake.written, SizeIs(3));
  for (const std::string& line : fake.written) EXPECT_EQ(line.back(), '\n');
}

TEST(ProgressTest, ShortRunsAndNoProgressSayNothing) {
  Fake fake;
  {
    Progress lines(ProgressStyle::kLines, "build", fake.write(), fake.clock());
    Progress none(ProgressStyle::kNone, "build", fake.write(), fake.clock());
    for (Progress* progress : {&lines, &none}) {
      progress->update(0.5);
      progress->finish();
    }
  }
  EXPECT_THAT(fake.written, IsEmpty());
}

TEST(ProgressTest, Durations) {
  EXPECT_EQ(duration_text(7.4), "0:07");
  EXPECT_EQ(duration_text(725), "12:05");
  EXPECT_EQ(duration_text(10800), "3:00:00");
}

}  // namespace
}  // namespace sqz
