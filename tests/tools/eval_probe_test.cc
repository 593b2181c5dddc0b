// Indexes of views and the probe, on the example model with a short context.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "formats/sqz_file.h"
#include "tests/common/temporary_directory.h"
#include "tools/sqz_eval/indexes.h"
#include "tools/sqz_eval/probe.h"
#include "tools/sqz_eval/settings.h"

namespace sqz::eval {
namespace {

using ::testing::HasSubstr;

// A context that changes what another one says: out * scale, lse + shift.
class ChangedContext final : public FixedContext {
 public:
  ChangedContext(FixedContext& inner, const ModelDescription& model, float scale, float shift)
      : inner_(inner), model_(model), scale_(scale), shift_(shift) {}

  int64_t tokens() const override { return inner_.tokens(); }
  Status attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                float* lse) override {
    SQZ_RETURN_IF_ERROR(inner_.attend(layer, first, count, q, out, lse));
    for (int64_t i = 0; i < count * model_.query_heads * model_.head_dim; ++i) out[i] *= scale_;
    for (int64_t i = 0; i < count * model_.query_heads; ++i) lse[i] += shift_;
    return {};
  }

 private:
  FixedContext& inner_;
  const ModelDescription& model_;
  float scale_, shift_;
};

class EvalProbe : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 1200;

  static void SetUpTestSuite() {
    RunnerOptions options;
    options.threads = 1;
    auto loaded = EvalModel::load(SQZ_SOURCE_DIR "/examples/models/nano", options);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    model_ = std::move(loaded).value().release();
    Haystack haystack{"lines", {}};
    std::string text;
    for (int line = 0; line < 150; ++line) {
      text += concat("On day ", line % 97, " the carrier walked to the mill and back.\n");
    }
    ASSERT_TRUE(model_->tokenizer().encode(text, false, haystack.ids).ok());
    TrialOptions trials;
    trials.tokens = kTokens;
    trials.tasks = {Task::kNeedle1};
    trials.continuation = 128;
    PassShape shape;
    shape.needles = shape.singles = 2;
    auto made = make_pass(model_->tokenizer(), haystack, shape, trials, 0);
    ASSERT_TRUE(made.ok()) << made.status().message();
    pass_ = new Pass(*made);
  }

  static Result<PassIndexes> indexes(const IndexStore& store, int* passes = nullptr) {
    EvalBuildOptions build;
    build.threads = 1;
    build.iterations = 2;
    return PassIndexes::make(*model_, *pass_, {"kmeans"}, store, build, [&](double done) {
      if (passes != nullptr && done == 1) ++*passes;
    });
  }

  static std::unique_ptr<IndexContext> open(const std::string& path, const char* selector) {
    SelectorOptions selection;
    selection.selector = selector;
    selection.sparsity = 0.9;
    const auto options = session_options(selection, 1);
    EXPECT_TRUE(options.ok());
    auto context = IndexContext::open(path, *options);
    EXPECT_TRUE(context.ok()) << context.status().message();
    return context.ok() ? std::move(context).value() : nullptr;
  }

  static EvalModel* model_;
  static Pass* pass_;
  testing::TemporaryDirectory folder_;
};

EvalModel* EvalProbe::model_ = nullptr;
Pass* EvalProbe::pass_ = nullptr;

TEST_F(EvalProbe, KnownChangesGiveKnownErrors) {
  const auto made = indexes({folder_.path(), false, false, false});
  ASSERT_TRUE(made.ok()) << made.status().message();
  const auto dense = open(made->path(0, "kmeans"), "dense");
  const auto same = open(made->path(0, "kmeans"), "dense");
  const auto squeezed = open(made->path(0, "kmeans"), "squeezed");
  ChangedContext longer(*same, model_->description(), 1.25f, 0);
  ChangedContext half(*same, model_->description(), 1, -std::log(2.0f));
  ChangedContext nothing(*same, model_->description(), 0, -INFINITY);
  Probe probe(model_->description(), {same.get(), &longer, &half, &nothing, squeezed.get()}, 128);
  ScoreOptions options;
  options.observer = [&](const ObservedAttention& attention) { return probe.observe(attention); };
  PlacedContext placed(*dense, kTokens);
  const auto losses = model_->runner().score(pass_->continuation, placed, options);
  ASSERT_TRUE(losses.ok()) << losses.status().message();
  const auto results = probe.results();
  for (size_t t = 0; t < 128; ++t) {
    EXPECT_EQ(results[0].error[t], 0);
    EXPECT_EQ(results[0].context_error[t], 0);
    EXPECT_EQ(results[0].recall[t], 1);
    EXPECT_NEAR(results[1].context_error[t], 0.25, 1e-5);
    EXPECT_GT(results[1].error[t], 0);
    EXPECT_EQ(results[1].recall[t], 1);
    EXPECT_EQ(results[2].context_error[t], 0);
    EXPECT_GT(results[2].error[t], 0);
    EXPECT_NEAR(results[2].recall[t], 0.5, 1e-5);
    EXPECT_EQ(results[3].context_error[t], 1);
    EXPECT_EQ(results[3].recall[t], 0);
    EXPECT_GT(results[4].recall[t], 0);
    EXPECT_LE(results[4].recall[t], 1 + 1e-5);
  }
  // The probe answers densely: so does a run without it.
  const auto plain = model_->runner().score(pass_->continuation, placed, {});
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(*losses, *plain);
}

// Attention behind the index of the whole text is attention to the whole text.
TEST_F(EvalProbe, LossesAreThoseOfAPlainPass) {
  Pass whole = *pass_;
  whole.views = {{"single-0", {{0, kTokens}}, {}, true}};
  EvalBuildOptions build;
  build.threads = 1;
  build.iterations = 2;
  const auto made = PassIndexes::make(*model_, whole, {"kmeans"},
                                      {folder_.path(), false, false, false}, build, {});
  ASSERT_TRUE(made.ok()) << made.status().message();
  const auto dense = open(made->path(0, "kmeans"), "dense");
  const auto losses = model_->runner().score(whole.continuation, *dense, {});
  ASSERT_TRUE(losses.ok()) << losses.status().message();

  std::vector<int32_t> all = whole.ids;
  all.insert(all.end(), whole.continuation.begin(), whole.continuation.end());
  std::vector<float> logits;
  GenerateOptions options;
  options.max_tokens = 0;
  ASSERT_TRUE(model_->runner().generate(all, options, nullptr, &logits).ok());
  const auto vocabulary = static_cast<size_t>(model_->description().vocab_size);
  for (size_t t = 0; t < losses->size(); ++t) {
    double sum = 0;
    const float* row = logits.data() + (static_cast<size_t>(kTokens) + t) * vocabulary;
    for (size_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(row[i]));
    const double expected = std::log(sum) - row[whole.continuation[t + 1]];
    EXPECT_NEAR((*losses)[t], expected, 0.05) << t;  // keys and values in the index are bf16
  }
}

TEST_F(EvalProbe, ViewIsWhatIsIndexed) {
  const auto made = indexes({folder_.path(), false, false, false});
  ASSERT_TRUE(made.ok()) << made.status().message();
  for (size_t v = 0; v < 2; ++v) {
    const auto file = SqzFile::open(made->path(v, "kmeans"));
    ASSERT_TRUE(file.ok());
    EXPECT_EQ((*file)->metadata().tokens, kTokens - pass_->planted[1 - v].count);
  }
  // Rows of two heads of four tokens, two numbers each, without token 1.
  std::vector<float> rows(16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  const View view{"", {{0, 1}, {2, 2}}, {}, false};
  EXPECT_THAT(visible_rows(rows, view, 2, 4, 2),
              ::testing::ElementsAre(0, 1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15));
}

TEST_F(EvalProbe, TemporariesAreRemovedAndSavedIndexesReused) {
  const auto count = [&] {
    return std::distance(std::filesystem::directory_iterator(folder_.path()), {});
  };
  {
    const auto made = indexes({folder_.path(), false, false, false});
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(count(), 2);
  }
  EXPECT_EQ(count(), 0);
  int passes = 0;
  const IndexStore keep{folder_.path(), true, false, false};
  ASSERT_TRUE(indexes(keep, &passes).ok());
  EXPECT_EQ(passes, 1);
  EXPECT_EQ(count(), 2);
  const auto again = indexes(keep);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), Code::kExists);
  const auto reused = indexes({folder_.path(), true, true, false}, &passes);
  ASSERT_TRUE(reused.ok()) << reused.status().message();
  EXPECT_FALSE(reused->built());
  EXPECT_EQ(passes, 1);
  // One of another view under this name is refused.
  std::filesystem::copy_file(reused->path(0, "kmeans"), reused->path(1, "kmeans"),
                             std::filesystem::copy_options::overwrite_existing);
  const auto wrong = indexes({folder_.path(), true, true, false});
  ASSERT_FALSE(wrong.ok());
  EXPECT_THAT(wrong.status().message(), HasSubstr("tokens_hash"));
}

}  // namespace
}  // namespace sqz::eval
