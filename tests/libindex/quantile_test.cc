#include "libindex/quantile.h"

#include <gtest/gtest.h>

#include <cmath>

namespace sqz {
namespace {

TEST(ScoreSketch, EndsAreBeyondEveryScore) {
  ScoreSketch sketch;
  for (float score : {0.0f, -1e-9f, -5.0f, -500.0f, -1e6f}) sketch.add(score, 1);
  EXPECT_GT(sketch.threshold(0), 0.0f);
  EXPECT_EQ(sketch.threshold(1), kBelowAllScores);
  EXPECT_TRUE(std::isfinite(kBelowAllScores));
  const std::vector<float> kept =
      sketch.kept(std::vector<float>{kAboveAllScores, -100.0f, kBelowAllScores});
  EXPECT_FLOAT_EQ(kept[0], 0.0f);
  EXPECT_FLOAT_EQ(kept[1], 0.6f);
  EXPECT_FLOAT_EQ(kept[2], 1.0f);
}

TEST(ScoreSketch, DroppedKeysCannotBeKept) {
  ScoreSketch sketch;
  sketch.add(-3, 30);
  sketch.add(-4, 20);
  sketch.add_dropped(50);
  EXPECT_EQ(sketch.total(), 100u);
  EXPECT_NEAR(sketch.threshold(0.3), -3, 0.01);
  EXPECT_NEAR(sketch.threshold(0.5), -4, 0.01);
  EXPECT_EQ(sketch.threshold(0.6), kBelowAllScores);
  EXPECT_FLOAT_EQ(sketch.kept(std::vector<float>{-3.5f})[0], 0.3f);
}

TEST(ScoreSketch, MergeAddsUp) {
  ScoreSketch a, b, both;
  for (int i = 0; i < 100; ++i) {
    const float score = -0.37f * static_cast<float>(i);
    (i % 3 == 0 ? a : b).add(score, static_cast<uint64_t>(i));
    both.add(score, static_cast<uint64_t>(i));
  }
  b.add_dropped(7);
  both.add_dropped(7);
  a.merge(b);
  EXPECT_EQ(a.total(), both.total());
  for (int i = 0; i <= 64; ++i) EXPECT_EQ(a.threshold(i / 64.0), both.threshold(i / 64.0));
}

}  // namespace
}  // namespace sqz
