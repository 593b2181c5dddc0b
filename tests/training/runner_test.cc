// Captures, a fixed context split off a dense pass, generation and bad input.
#include <algorithm>
#include <cmath>

#include "tests/common/must.h"
#include "tests/libruntime/reference.h"
#include "tests/training/golden.h"

namespace sqz {
namespace {

const char* const kModels[] = {"llama-tied", "llama-llama3-bias", "mistral-window", "qwen3"};

// All that a dense pass hands out, kept.
struct Kept {
  std::vector<float> keys, keys_pre_rope, values, queries, queries_pre_rope, cosine;
};

Status capture(Runner& runner, std::span<const int32_t> tokens, PrefillOptions options,
               std::vector<Kept>& kept) {
  const auto copy = [](std::span<const float> x) { return std::vector<float>(x.begin(), x.end()); };
  options.consumer = [&](const LayerCapture& layer) {
    EXPECT_EQ(layer.layer, static_cast<int64_t>(kept.size()));
    kept.push_back({copy(layer.keys), copy(layer.keys_pre_rope), copy(layer.values),
                    copy(layer.queries), copy(layer.queries_pre_rope), copy(layer.cosine)});
    return Status();
  };
  return runner.prefill(tokens, options);
}

// Exact attention in float64 over captured keys: what an index with nothing left out would say.
class ExactContext final : public FixedContext {
 public:
  ExactContext(const ModelDescription& model, std::vector<Kept> layers, int64_t tokens)
      : model_(model), layers_(std::move(layers)), tokens_(tokens) {}

  int64_t tokens() const override { return tokens_; }

  Status attend(int64_t layer, const ContextQueries& queries) override {
    calls += 1;
    longest = std::max(longest, queries.indptr.back());
    const auto* q = static_cast<const float*>(queries.q);
    auto* out = static_cast<float*>(queries.out);
    for (size_t r = 0; r < queries.first.size(); ++r) {
      for (int64_t t = queries.indptr[r]; t < queries.indptr[r + 1]; ++t) {
        for (int64_t h = 0; h < model_.query_heads; ++h) {
          const int64_t row = t * model_.query_heads + h;
          attend_row(layer, queries.first[r] + t - queries.indptr[r], h, q + row * model_.head_dim,
                     out + row * model_.head_dim, queries.lse + row);
        }
      }
    }
    return fail_at == calls ? Status(Code::kCorrupt, "the context is broken") : Status();
  }

  int64_t calls = 0, longest = 0, fail_at = -1;

 private:
  void attend_row(int64_t layer, int64_t position, int64_t head, const float* q, float* out,
                  float* lse) const {
    const int64_t window = model_.sliding_window[static_cast<size_t>(layer)];
    const Kept& kept = layers_[static_cast<size_t>(layer)];
    LayerView view;
    view.dtype = DType::kF32;
    view.head_dim = model_.head_dim;
    reference::Attention attention(q, view, model_.attention_scale);
    for (int64_t i = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; i < tokens_;
         ++i) {
      attention.add(kept.keys.data(), kept.values.data(), head / model_.group_size() * tokens_ + i);
    }
    const reference::State state = attention.state();
    for (const double x : state.out) *out++ = static_cast<float>(x);
    *lse = static_cast<float>(state.lse);
  }

  ModelDescription model_;
  std::vector<Kept> layers_;
  int64_t tokens_;
};

// q, k, v of [heads, n, d] gathered at positions from [heads, N, d].
std::vector<float> gather(const std::vector<float>& all, int64_t heads, int64_t tokens, int64_t d,
                          const std::vector<int64_t>& positions) {
  std::vector<float> out;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t p : positions) {
      const auto row = all.begin() + (h * tokens + p) * d;
      out.insert(out.end(), row, row + d);
    }
  }
  return out;
}

class Model : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string folder = golden_path(GetParam());
    golden_ = read_golden(folder + "/golden.safetensors");
    runner_ = load_runner(folder);
  }
  const ModelDescription& model() const { return runner_->config().description; }
  int64_t count() const { return static_cast<int64_t>(golden_.tokens.size()); }

  Golden golden_;
  std::unique_ptr<Runner> runner_;
};

INSTANTIATE_TEST_SUITE_P(Tiny, Model, testing::ValuesIn(kModels), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// The layer's output is a function of what was captured, so each layer can be checked from the
// captures alone: q at all positions equals q at some; one token at a time equals all at once.
TEST_P(Model, CapturesDoNotDependOnTheChunk) {
  PrefillOptions options;
  options.pre_rope = options.cosine = true;
  for (int64_t p = 0; p < count(); ++p) options.query_positions.push_back(p);
  std::vector<Kept> whole, single, some;
  options.chunk = count();
  ASSERT_TRUE(capture(*runner_, golden_.tokens, options, whole).ok());
  options.chunk = 1;
  ASSERT_TRUE(capture(*runner_, golden_.tokens, options, single).ok());
  options.chunk = 70;
  options.query_positions = {0, 69, 70, 71, 200, count() - 1};
  ASSERT_TRUE(capture(*runner_, golden_.tokens, options, some).ok());
  ASSERT_EQ(whole.size(), static_cast<size_t>(model().layers));
  ASSERT_EQ(single.size(), whole.size());
  ASSERT_EQ(some.size(), whole.size());

  const int64_t d = model().head_dim, kv = model().kv_heads * count() * d;
  for (size_t l = 0; l < whole.size(); ++l) {
    ASSERT_EQ(whole[l].keys.size(), static_cast<size_t>(kv));
    ASSERT_EQ(whole[l].queries.size(), static_cast<size_t>(model().query_heads * count() * d));
    ASSERT_EQ(whole[l].cosine.size(), static_cast<size_t>(count()));
    for (auto field : {&Kept::keys, &Kept::keys_pre_rope, &Kept::values, &Kept::queries,
                       &Kept::queries_pre_rope, &Kept::cosine}) {
      EXPECT_LT(largest_difference(whole[l].*field, single[l].*field), 2e-4) << "layer " << l;
    }
    for (auto field : {&Kept::queries, &Kept::queries_pre_rope}) {
      const auto expected =
          gather(whole[l].*field, model().query_heads, count(), d, options.query_positions);
      EXPECT_LT(largest_difference(expected, some[l].*field), 2e-4) << "layer " << l;
    }
  }
}

TEST_P(Model, ContextPlusPromptEqualsDense) {
  for (int64_t split : {1, 150, 297}) {
    std::vector<Kept> kept;
    const std::span<const int32_t> all(golden_.tokens);
    ASSERT_TRUE(capture(*runner_, all.first(static_cast<size_t>(split)), {}, kept).ok());
    ExactContext context(model(), std::move(kept), split);
    const auto dense = logits_of(*runner_, all);
    const auto expected = std::span(dense).subspan(static_cast<size_t>(split * model().vocab_size));
    GenerateOptions options;
    options.max_tokens = 0;
    std::vector<float> rows;
    const auto answer =
        must(runner_->generate(all.subspan(static_cast<size_t>(split)), options, &context, &rows));
    EXPECT_TRUE(answer.tokens.empty());
    EXPECT_LT(largest_difference(rows, expected), 1e-3) << "split at " << split;
    EXPECT_EQ(context.calls, model().layers) << "a prompt is one call a layer";
    EXPECT_EQ(context.longest, count() - split);
  }
}

// Answers of several lengths, more than fit at a time, beside each by itself.
TEST_P(Model, AnswersTogetherAreThoseOneByOne) {
  constexpr int64_t kSplit = 150, kQuestions = 7;
  std::vector<Kept> kept;
  const std::span<const int32_t> all(golden_.tokens);
  ASSERT_TRUE(capture(*runner_, all.first(kSplit), {}, kept).ok());
  ExactContext context(model(), std::move(kept), kSplit);
  std::vector<Question> questions;
  for (int64_t i = 0; i < kQuestions; ++i) {
    const auto prompt =
        all.subspan(static_cast<size_t>(kSplit + 9 * i), static_cast<size_t>(3 + i));
    GenerateOptions options;
    options.max_tokens = 2 + 3 * (i % 3);
    questions.push_back({{prompt.begin(), prompt.end()}, options});
  }
  for (int64_t width : {1, 3, 16}) {
    std::vector<Generation> together(kQuestions);
    size_t ended = 0;
    const Status status = runner_->generate_batch(
        questions, width, context, [&](int64_t index, Generation generation) {
          together[static_cast<size_t>(index)] = std::move(generation);
          ++ended;
          return Status();
        });
    must(status);
    EXPECT_EQ(ended, questions.size());
    for (size_t i = 0; i < questions.size(); ++i) {
      const auto alone =
          must(runner_->generate(questions[i].prompt, questions[i].options, &context));
      EXPECT_EQ(together[i].tokens, alone.tokens) << "question " << i << ", width " << width;
      EXPECT_EQ(together[i].stop_reason, alone.stop_reason);
    }
  }
}

TEST_P(Model, AnswersOverAContextEqualDenseAnswers) {
  const std::span<const int32_t> prompt(golden_.prompt);
  std::vector<Kept> kept;
  ASSERT_TRUE(capture(*runner_, prompt.first(120), {}, kept).ok());
  ExactContext context(model(), std::move(kept), 120);
  GenerateOptions options;
  options.max_tokens = static_cast<int64_t>(golden_.generated.size());
  const auto answer = must(runner_->generate(prompt.subspan(120), options, &context));
  EXPECT_EQ(answer.tokens, golden_.generated);
  EXPECT_EQ(answer.stop_reason, "length");
}

TEST_P(Model, ContextErrorsStopGeneration) {
  std::vector<Kept> kept;
  const std::span<const int32_t> prompt(golden_.prompt);
  ASSERT_TRUE(capture(*runner_, prompt.first(120), {}, kept).ok());
  ExactContext context(model(), std::move(kept), 120);
  context.fail_at = 3;
  const auto answer = runner_->generate(prompt.subspan(120), {}, &context);
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.status().code(), Code::kCorrupt);
  EXPECT_EQ(context.calls, 3);
}

class Llama : public Model {};
INSTANTIATE_TEST_SUITE_P(Tiny, Llama, testing::Values("llama-tied"));

TEST_P(Llama, TheSameOnOneAndTwoThreads) {
  std::vector<Kept> kept[2];
  for (int threads : {1, 2}) {
    RunnerOptions options;
    options.threads = threads;
    const auto runner = load_runner(golden_path(GetParam()), options);
    PrefillOptions prefill;
    prefill.query_positions = {299};
    prefill.chunk = 64;
    ASSERT_TRUE(capture(*runner, golden_.tokens, prefill, kept[threads - 1]).ok());
  }
  for (size_t l = 0; l < kept[0].size(); ++l) {
    EXPECT_EQ(kept[0][l].keys, kept[1][l].keys);
    EXPECT_EQ(kept[0][l].queries, kept[1][l].queries);
  }
}

TEST_P(Llama, StopsWhereToldTo) {
  GenerateOptions options;
  options.max_tokens = 24;
  options.stop = {golden_.generated[5]};
  const auto first = std::find(golden_.generated.begin(), golden_.generated.end(), options.stop[0]);
  auto answer = runner_->generate(golden_.prompt, options);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->stop_reason, "stop");
  EXPECT_EQ(answer->tokens, std::vector<int32_t>(golden_.generated.begin(), first));

  options.stop.clear();
  int64_t seen = 0;
  options.on_token = [&](int32_t) { return ++seen < 3; };
  answer = runner_->generate(golden_.prompt, options);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->stop_reason, "callback");
  EXPECT_EQ(answer->tokens.size(), 3u);
}

TEST_P(Llama, EndsAtTheLastPosition) {
  std::vector<int32_t> prompt(510, 5);
  GenerateOptions options;
  options.max_tokens = 1000;
  const auto answer = must(runner_->generate(prompt, options));
  EXPECT_EQ(answer.stop_reason, "length");
  EXPECT_EQ(answer.tokens.size(), 3u);  // the last is chosen by position 511 and never run
}

TEST_P(Llama, ConsumerErrorStopsThePass) {
  PrefillOptions options;
  int calls = 0;
  options.consumer = [&](const LayerCapture&) {
    ++calls;
    return Status(Code::kIo, "disk full");
  };
  EXPECT_EQ(runner_->prefill(golden_.tokens, options).code(), Code::kIo);
  EXPECT_EQ(calls, 1);
}

TEST_P(Llama, BadInputIsNamed) {
  const auto message = [&](std::vector<int32_t> tokens) {
    const Status result = runner_->prefill(tokens, {});
    EXPECT_EQ(result.code(), Code::kInvalidArgument);
    return result.message();
  };
  EXPECT_EQ(message({}), "no tokens to run the model on");
  EXPECT_EQ(message({1, 96}), "token 1: found id 96, expected 0 to 95");
  EXPECT_EQ(message({-1}), "token 0: found id -1, expected 0 to 95");
  EXPECT_EQ(message(std::vector<int32_t>(513, 1)), "513 tokens: the model has 512 positions");
}

TEST(Load, RefusesAFolderThatIsNotThere) {
  EXPECT_EQ(Runner::load("/nowhere", {}).status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace sqz
