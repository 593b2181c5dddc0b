// Training from end to end on the example model, in a setting that takes seconds.
#include "training/qmodel.h"

#include <gmock/gmock.h>

#include "formats/tokenizer.h"
#include "tests/common/must.h"
#include "tests/common/same_qmodel.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/training/golden.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::TemporaryDirectory;

class QmodelTraining : public ::testing::Test {
 protected:
  void SetUp() override {
    runner_ = load_runner(nano_folder());
    const auto tokenizer = must(Tokenizer::load(nano_folder()));
    const std::string book = testing::read_file(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
    TokenText text{"dracula.txt", {}};
    ASSERT_TRUE(tokenizer->encode(book.substr(4000, 24000), true, text.tokens).ok());
    texts_.push_back(text);
    options_.buckets = 16;
    options_.hidden = 32;
    options_.window = 512;
    options_.recent = 64;
    options_.first_token = 0;
    options_.steps = 60;
    options_.batch = 64;
    options_.learning_rate = 3e-3;
    options_.positions = 128;
    options_.queries = 64;
    options_.keys_per_bucket = 32;
    options_.checks = 4;
    // Room for three windows: the others stream through.
    options_.memory = 3 * 10 * 64 * (64 + 16) * 4;
  }

  Result<QmodelTrained> train(const QmodelOptions& options) {
    return train_qmodel(*runner_, texts_, {}, options);
  }
  std::string refused(const QmodelOptions& options, Code code) {
    const auto trained = train(options);
    EXPECT_EQ(trained.status().code(), code) << trained.status().message();
    return trained.status().message();
  }
  TemporaryDirectory dir_;
  std::unique_ptr<Runner> runner_;
  std::vector<TokenText> texts_;
  QmodelOptions options_;
};

void expect_same(const QmodelFile& a, const QmodelFile& b) {
  testing::expect_same_layers(a, b);
  EXPECT_EQ(a.training, b.training);
}

TEST_F(QmodelTraining, LearnsAndWritesAFileThatReadsBack) {
  options_.steps = 150;
  std::vector<QmodelCheck> checks;
  double last = 0;
  options_.check = [&](const QmodelCheck& found) { checks.push_back(found); };
  options_.progress = [&](double done) {
    EXPECT_LE(done, 1);
    last = std::max(last, done);
  };
  const auto trained = must(train(options_));
  EXPECT_EQ(last, 1);
  ASSERT_GE(checks.size(), 4u);
  EXPECT_LT(checks.back().loss, 0.9 * checks.front().loss);
  EXPECT_GT(trained.windows, 6);
  EXPECT_EQ(trained.held_out, 1);
  ASSERT_EQ(trained.scores.size(), 4u);
  EXPECT_EQ(trained.scores[0].method, "classifier");
  const auto& recall = trained.scores[0].recall;
  ASSERT_EQ(recall.size(), 3u);
  for (const QmodelRecall& row : recall) {
    EXPECT_GT(row.recall, 1.5 * row.selectivity) << "better than buckets by chance";
  }

  const std::string path = dir_.file("q.sqz");
  ASSERT_TRUE(write_qmodel_file(Env::posix(), path, false, trained.file).ok());
  const auto back = must(read_qmodel_file(path));
  expect_same(back, trained.file);
  EXPECT_EQ(back.dense, std::vector<int64_t>{0});
  EXPECT_TRUE(back.layers[0].centroids.empty());
  EXPECT_EQ(back.layers[5].centroids.size(), 2u * 16 * 64);
  EXPECT_EQ(back.recent, 64);
}

TEST_F(QmodelTraining, TheSeedDecides) {
  options_.steps = 20;
  texts_[0].tokens.resize(static_cast<size_t>(5 * options_.window));
  const auto first = train(options_), again = train(options_);
  ASSERT_TRUE(first.ok()) << first.status().message();
  expect_same(first->file, again->file);
  EXPECT_EQ(first->loss, again->loss);
  options_.seed = 1;
  EXPECT_NE(train(options_)->file.layers[1].output_weight, first->file.layers[1].output_weight);
}

TEST_F(QmodelTraining, WhatCannotBeTrainedIsRefused) {
  struct Case {
    std::function<void(QmodelOptions&)> change;
    Code code;
    const char* says;
  };
  const Code invalid = Code::kInvalidArgument;
  for (const Case& one : std::vector<Case>{
           {[](auto& o) { o.buckets = 1024; }, Code::kCorrupt,
            "expected at least 32768 for 1024 buckets"},
           {[](auto& o) { o.recent = 128; }, invalid, "window: found 512, expected at least 520"},
           {[](auto& o) { o.dense = {0, 1, 2, 3, 4, 5}; }, invalid, "all are dense"},
           {[](auto& o) { o.dense = {6}; }, invalid, "dense: found 6"},
           {[](auto& o) { o.window = 40000; }, invalid, "at most 32768"}}) {
    QmodelOptions options = options_;
    one.change(options);
    EXPECT_THAT(refused(options, one.code), HasSubstr(one.says));
  }
  const std::vector<TokenText> empty = {{"none.txt", {0, 1, 2}}};
  EXPECT_THAT(train_qmodel(*runner_, empty, {}, options_).status().message(),
              HasSubstr("none.txt: tokens to train on: found 0 in 0 windows"));
  EXPECT_THAT(train_qmodel(*runner_, texts_, empty, options_).status().message(),
              HasSubstr("none.txt: tokens to measure with: found no window"));
}

}  // namespace
}  // namespace sqz
