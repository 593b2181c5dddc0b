// An index written again with other metadata.
#include "libindex/copy_index.h"

#include <gmock/gmock.h>

#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

LayerBudgets budgets() {
  return {.allocation = "measured",
          .context = 64,
          .uniform_budget = 20,
          .p = 1,
          .budget = {9, 31},
          .cosine = {0.25, 0.75}};
}

// A file of version 1 becomes one of the newest version, without the group policies max and any.
TEST(CopyIndex, WritesTheNewestVersion) {
  const testing::TemporaryDirectory directory;
  const auto before = SqzFile::open(SQZ_SOURCE_DIR "/tests/golden/index/version1.sqz").value();
  const Calibration calibration = before->calibration().value();
  ASSERT_TRUE(copy_index(Env::posix(), *before, before->metadata(), calibration,
                         directory.file("b.sqz"), false)
                  .ok());
  const auto after = SqzFile::open(directory.file("b.sqz")).value();
  EXPECT_EQ(after->metadata().version, kFormatVersion);
  EXPECT_EQ(after->verify().message(), "");
  EXPECT_EQ(after->calibration().value().thresholds, calibration.thresholds);
  EXPECT_EQ(after->calibration().value().coarse, calibration.coarse);
  EXPECT_EQ(3 * after->tensor("calibration.thresholds").size(),
            before->tensor("calibration.thresholds").size());
}

TEST(CopyIndex, RefusesLayerBudgetsThatDoNotFit) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("a.sqz"), output = directory.file("b.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  const auto embed = [&](const LayerBudgets& wanted) {
    const auto index = SqzFile::open(path, OpenMode::kRead).value();
    IndexMetadata metadata = index->metadata();
    metadata.layer_budgets = wanted;
    const Status status =
        copy_index(Env::posix(), *index, metadata, index->calibration().value(), output, false)
            .status();
    EXPECT_FALSE(Env::posix().exists(output));
    return status.message();
  };
  LayerBudgets wrong = budgets();
  wrong.budget = {9, 31, 20};
  EXPECT_THAT(embed(wrong), HasSubstr("budget: found an array of 3, expected 2"));
}

}  // namespace
}  // namespace sqz
