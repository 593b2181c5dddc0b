// Layer budgets put into a finished index: everything else stays.
#include "libindex/copy_index.h"

#include <gmock/gmock.h>

#include <fstream>

#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::TinyIndexOptions;

LayerBudgets budgets() {
  return {.allocation = "measured",
          .context = 64,
          .uniform_budget = 20,
          .p = 1,
          .budget = {9, 31},
          .cosine = {0.25, 0.75}};
}

TEST(EmbedLayerBudgets, EverythingElseStays) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("a.sqz"), output = directory.file("b.sqz");
  TinyIndexOptions o;
  o.heavy_hitters = true;
  ASSERT_TRUE(testing::write_tiny_index(path, o).ok());
  const auto before = SqzFile::open(path).value();
  const auto bytes = embed_layer_budgets(Env::posix(), *before, budgets(), output, false, 1);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const auto after = SqzFile::open(output).value();
  EXPECT_EQ(after->file_bytes(), *bytes);
  EXPECT_TRUE(after->verify().value().problems.empty());
  ASSERT_TRUE(after->metadata().layer_budgets);
  EXPECT_EQ(after->metadata().layer_budgets->budget, budgets().budget);
  EXPECT_EQ(after->metadata().layer_budgets->cosine, budgets().cosine);
  EXPECT_EQ(after->metadata().layer_budgets->allocation, "measured");
  EXPECT_EQ(after->metadata().layer_budgets->context, 64);
  EXPECT_EQ(after->metadata().layer_budgets->uniform_budget, 20);
  for (const TensorInfo& tensor : before->header().tensors) {
    if (tensor.name.starts_with("padding.") || tensor.name == "header.xxh3_128") continue;
    const auto a = before->tensor(tensor.name), b = after->tensor(tensor.name);
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << tensor.name;
  }
  // In place, and others instead.
  LayerBudgets other = budgets();
  other.budget = {20, 20};
  ASSERT_TRUE(embed_layer_budgets(Env::posix(), *after, other, output, true, 1).ok());
  EXPECT_EQ(SqzFile::open(output).value()->metadata().layer_budgets->budget, other.budget);
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
  EXPECT_TRUE(after->verify().value().problems.empty());
  EXPECT_EQ(after->calibration().value().thresholds, calibration.thresholds);
  EXPECT_EQ(after->calibration().value().coarse, calibration.coarse);
  EXPECT_EQ(3 * after->tensor("calibration.thresholds").size(),
            before->tensor("calibration.thresholds").size());
}

TEST(EmbedLayerBudgets, RefusesWhatDoesNotFitOrIsDamaged) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("a.sqz"), output = directory.file("b.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  const auto embed = [&](const LayerBudgets& wanted) {
    const auto index = SqzFile::open(path, OpenMode::kRead).value();
    const Status status =
        embed_layer_budgets(Env::posix(), *index, wanted, output, false, 1).status();
    EXPECT_FALSE(Env::posix().exists(output));
    return status.message();
  };
  const struct {
    void (*change)(LayerBudgets&);
    const char* says;
  } cases[] = {{[](auto& b) {
                  b.budget = {9, 31, 20};
                },
                "budget: found 3 values, expected 2"},
               {[](auto& b) {
                  b.budget = {9, 30};
                },
                "budget: found a sum of 39, expected 40"},
               {[](auto& b) {
                  b.budget = {-25, 65};
                },
                "budget[0]: found -25"},
               {[](auto& b) {
                  b.cosine = {0.25, 1.5};
                },
                "cosine[1]: found 1.5"},
               {[](auto& b) { b.p = 0; }, "p: found 0"},
               {[](auto& b) { b.uniform_budget = 65; }, "uniform_budget: found 65"}};
  for (const auto& [change, says] : cases) {
    LayerBudgets wrong = budgets();
    change(wrong);
    EXPECT_THAT(embed(wrong), HasSubstr(says));
  }
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4096 * 3 + 7);
  file.put('\x55');
  file.close();
  EXPECT_THAT(embed(budgets()), HasSubstr("XXH3-64"));
}

}  // namespace
}  // namespace sqz
