#include "tools/common/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace sqz {
namespace {

using ::testing::HasSubstr;

// A clock that the test moves, and everything that was written.
struct Fake {
  double now = 1000;
  std::vector<std::string> written;

  Progress progress(ProgressStyle style) {
    return {style, "build", [this](const std::string& text) { written.push_back(text); },
            [this] { return now; }};
  }
};

TEST(ProgressTest, StyleFollowsTheOptionsThenTheTerminal) {
  EXPECT_EQ(progress_style({}, true, false), ProgressStyle::kBar);
  EXPECT_EQ(progress_style({}, false, false), ProgressStyle::kLines);
  EXPECT_EQ(progress_style({}, true, true), ProgressStyle::kNone);
  EXPECT_EQ(progress_style(true, false, true), ProgressStyle::kBar);
  EXPECT_EQ(progress_style(false, true, false), ProgressStyle::kNone);
}

TEST(ProgressTest, ABarIsRefreshedSixTimesASecondAndNeverFalls) {
  Fake fake;
  {
    Progress bar = fake.progress(ProgressStyle::kBar);
    for (int i = 0; i < 1000; ++i) {
      fake.now += 0.01;  // 10 seconds
      bar.update(i % 100 == 99 ? 0 : i / 2000.0);
    }
  }
  EXPECT_LE(fake.written.size(), 62u);  // and the last newline
  EXPECT_GE(fake.written.size(), 40u);
  EXPECT_EQ(fake.written.back(), "\n");
  int last = 0;
  for (const std::string& text : fake.written) {
    if (text == "\n") continue;
    const size_t end = text.find(" %");
    const int percent = std::stoi(text.substr(text.find_last_not_of("0123456789", end - 1) + 1));
    EXPECT_GE(percent, last);
    last = percent;
  }
  EXPECT_EQ(last, 49);
}

TEST(ProgressTest, SaysTheTimeThatIsLeft) {
  Fake fake;
  Progress bar = fake.progress(ProgressStyle::kBar);
  fake.now += 30;
  bar.update(0.25);  // 30 s for a quarter: 90 s for the rest
  EXPECT_THAT(fake.written.back(), HasSubstr("build [#######......"));
  EXPECT_THAT(fake.written.back(), HasSubstr(" 25 %, 1:30 left"));
  EXPECT_EQ(duration_text(10800), "3:00:00");
}

TEST(ProgressTest, WithoutATerminalALineEveryThirtySeconds) {
  Fake fake;
  Progress lines = fake.progress(ProgressStyle::kLines);
  Progress none = fake.progress(ProgressStyle::kNone);
  for (int second = 1; second <= 95; ++second) {
    fake.now += 1;
    lines.update(second / 100.0);
    none.update(second / 100.0);
    EXPECT_EQ(fake.written.size(), static_cast<size_t>(second / 30));
  }
  EXPECT_EQ(fake.written.back().back(), '\n');
}

}  // namespace
}  // namespace sqz
