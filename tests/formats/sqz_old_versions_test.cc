// Files that older versions wrote (tests/golden/index) are read as if they were new.
#include <gtest/gtest.h>

#include "tests/common/must.h"
#include "tests/common/tiny_index.h"

namespace sqz {
namespace {

std::shared_ptr<const SqzFile> golden(const std::string& name) {
  return must(SqzFile::open(concat(SQZ_SOURCE_DIR "/tests/golden/index/", name, ".sqz")));
}

// The file has the tiny index's calibration for the mean, and other numbers for the policies max
// and any.
TEST(OldVersions, TheCalibrationOfTheMeanIsRead) {
  for (const int version : {1, 2}) {
    SCOPED_TRACE(version);
    const auto file = golden(concat("version", version));
    EXPECT_EQ(file->metadata().version, version);
    EXPECT_EQ(file->verify().message(), "");
    const auto found = must(file->calibration());
    const Calibration expected = testing::tiny::calibration(file->metadata());
    EXPECT_EQ(found.thresholds, expected.thresholds);
    EXPECT_EQ(found.coarse, expected.coarse);
    EXPECT_EQ(found.shares, expected.shares);
  }
}

TEST(OldVersions, CurvesOfSingleKeysAreUnused) {
  const auto file = golden("keys");
  EXPECT_FALSE(file->tensor("calibration.keys.shares").empty());
  EXPECT_EQ(file->metadata().partition, Partition::kPages);
  EXPECT_EQ(file->verify().message(), "");
}

TEST(OldVersions, CodesOfSingleKeysAreUnused) {
  const auto file = golden("version2");
  EXPECT_FALSE(file->tensor("layers.0.key_codes").empty());
  EXPECT_FALSE(file->tensor("rotation").empty());
  EXPECT_EQ(file->layer(0).coded_keys.bits, 8);
}

}  // namespace
}  // namespace sqz
