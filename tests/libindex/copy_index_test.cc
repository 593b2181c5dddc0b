// An index written again with other metadata.
#include "libindex/copy_index.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "libindex/compress.h"
#include "libindex/prune.h"
#include "libindex/recalibrate.h"
#include "tests/common/check_index.h"
#include "tests/common/layered_index.h"
#include "tests/common/must.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

// A file of version 1 becomes one of the newest version, without the group policies max and any.
TEST(CopyIndex, WritesTheNewestVersion) {
  const testing::TemporaryDirectory directory;
  const auto before = SqzFile::open(SQZ_SOURCE_DIR "/tests/golden/index/version1.sqz").value();
  const Calibration calibration = before->calibration().value();
  must(copy_index(Env::posix(), *before, before->metadata(), calibration, directory.file("b.sqz"),
                  false));
  const auto after = SqzFile::open(directory.file("b.sqz")).value();
  EXPECT_EQ(after->metadata().version, kFormatVersion);
  EXPECT_EQ(after->verify().message(), "");
  EXPECT_EQ(after->calibration().value().thresholds, calibration.thresholds);
  EXPECT_EQ(after->calibration().value().coarse, calibration.coarse);
  EXPECT_EQ(3 * after->tensor("calibration.thresholds").size(),
            before->tensor("calibration.thresholds").size());
}

// What serves full layers carries the others over.
TEST(CopyIndex, KeepsLayersOfEveryKind) {
  const testing::TemporaryDirectory directory;
  const auto path = [&](const char* name) { return directory.file(name); };
  ASSERT_EQ(testing::write_layered_index(path("a.sqz")).message(), "");
  ASSERT_EQ(testing::write_layered_index(path("b.sqz"), {}, false).message(), "");
  EXPECT_EQ(testing::read_file(path("a.sqz")), testing::read_file(path("b.sqz")));
  const auto whole = SqzFile::open(path("a.sqz"), OpenMode::kVerify).value();
  Env& env = Env::posix();
  RecordedQueries recorded{{2, 1}, std::vector<std::vector<float>>(6), "three"};
  recorded.layers[0] = testing::Random(7).normals(3 * 4 * 8);
  const auto compressed =
      compress_index(env, *whole, {.rows = RowKind::kQ8}, path("q8.sqz"), false, 1);
  EXPECT_EQ(compressed.status().message(), "");
  EXPECT_EQ(recalibrate(env, *whole, recorded, path("r.sqz"), {}).status().message(), "");
  const SelectionRequest recent = {.selector = SelectorKind::kStream, .keep = 0.5};
  EXPECT_EQ(prune_index(env, whole, recent, path("p.sqz"), false, 1).status().message(), "");
  for (const char* name : {"a.sqz", "q8.sqz", "r.sqz", "p.sqz"}) {
    SCOPED_TRACE(name);
    const auto file = must(SqzFile::open(path(name), OpenMode::kVerify));
    EXPECT_EQ(file->metadata().model, testing::layered_model());
    EXPECT_EQ(file->metadata().version, kVersionOfLayers);
    const auto [code, output] = testing::check_index(path(name));
    EXPECT_LE(code, 0) << output;  // -1 without numpy
    for (const TensorInfo& tensor : whole->header().tensors) {
      const bool kept = tensor.name.find(".state.") != std::string::npos ||
                        tensor.name.starts_with("layers.1.") ||
                        tensor.name.starts_with("layers.4.");
      if (!kept) continue;
      const auto expected = whole->tensor(tensor.name), found = file->tensor(tensor.name);
      EXPECT_TRUE(std::ranges::equal(expected, found)) << tensor.name;
    }
  }
  const LayerView& chunked = whole->layer(4);
  EXPECT_EQ(chunked.exact, 7);  // of 47 tokens, in chunks of 10
  EXPECT_EQ(whole->layer(1).exact, 8);
  const StateTensor& conv = whole->layer(2).state[0];
  EXPECT_EQ(conv.name, "conv");
  EXPECT_EQ(std::memcmp(conv.data, testing::layered_state()[2][1].data, 24), 0);
}

}  // namespace
}  // namespace sqz
