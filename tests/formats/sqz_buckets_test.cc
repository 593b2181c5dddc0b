// Indexes of the buckets of a query classifier: what the header may say.
#include "tests/common/tiny_buckets.h"
#include "tests/formats/malformed_file.h"

namespace sqz {
namespace {

using testing::meta;
using testing::without;
using testing::Wrong;

constexpr int64_t kTokens = 160;

Wrong without_logits() {
  return {"NoLogits", [](testing::RawIndex& file) { file.metadata.erase("logits"); },
          "logits: found nothing, expected \"key\": train the query classifier again and build the "
          "index with it"};
}

TEST(SqzBuckets, WhatIsWrittenIsRead) {
  const testing::TemporaryDirectory dir;
  const QmodelFile qmodel = testing::tiny_qmodel();
  ASSERT_TRUE(testing::write_tiny_buckets(dir.file("x.sqz"), qmodel, kTokens).ok());
  const auto file = SqzFile::open(dir.file("x.sqz"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ((*file)->metadata().partition, Partition::kBuckets);
  EXPECT_EQ((*file)->metadata().buckets, qmodel.buckets);
  EXPECT_EQ((*file)->metadata().hidden, qmodel.hidden);
  EXPECT_THAT((*file)->verify()->problems, ::testing::IsEmpty());
  const testing::RawIndex raw = testing::RawIndex::read(dir.file("x.sqz"));
  EXPECT_EQ(raw.metadata.at("logits"), "key");
}

class SqzBucketsHeader : public ::testing::TestWithParam<Wrong> {};

TEST_P(SqzBucketsHeader, IsRefused) {
  const testing::TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  ASSERT_TRUE(testing::write_tiny_buckets(path, testing::tiny_qmodel(), kTokens).ok());
  testing::expect_refused(GetParam(), path,
                          [](const std::string& at) { return SqzFile::open(at).status(); });
}

INSTANTIATE_TEST_SUITE_P(
    All, SqzBucketsHeader,
    ::testing::Values(without("NoBuckets", "buckets"), without("NoHidden", "hidden"),
                      without_logits(),
                      meta("LogitsOfBuckets", "logits", "bucket",
                           "logits: found \"bucket\", expected \"key\": train"),
                      meta("OneBucket", "buckets", "1", "buckets: found 1"),
                      meta("HiddenNone", "hidden", "0", "hidden: found 0"),
                      meta("MoreBuckets", "buckets", "4", "layers.1.buckets.offsets"),
                      meta("Levels", "levels", "1", "levels: found 1, expected 0"),
                      meta("ValueMeans", "value_means", "true",
                           "value_means: found true, expected false: of buckets")),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace sqz
