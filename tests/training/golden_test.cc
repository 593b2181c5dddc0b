// Logits against Hugging Face transformers.
#include "tests/training/golden.h"

#include <cstdlib>
#include <filesystem>

namespace sqz {
namespace {

constexpr double kTolerance = 2e-3;

void expect_golden(const std::string& model, const std::string& golden_file) {
  const Golden golden = read_golden(golden_file);
  const auto runner = load_runner(model);
  const auto vocab = static_cast<size_t>(runner->config().description.vocab_size);
  const std::vector<float> all = logits_of(*runner, golden.tokens);
  for (size_t i = 0; i < golden.positions.size(); ++i) {
    EXPECT_LT(largest_difference(
                  std::span(all).subspan(static_cast<size_t>(golden.positions[i]) * vocab, vocab),
                  std::span(golden.logits).subspan(i * vocab, vocab)),
              kTolerance)
        << "position " << golden.positions[i];
  }

  GenerateOptions generate;
  generate.max_tokens = static_cast<int64_t>(golden.generated.size());
  std::vector<float> rows;
  const auto answer = runner->generate(golden.prompt, generate, nullptr, &rows);
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_EQ(answer->tokens, golden.generated);
  ASSERT_EQ(rows.size(), (golden.prompt.size() + golden.generated.size() - 1) * vocab);
  const auto last = std::span(rows).last(golden.generated_logits.size());
  EXPECT_LT(largest_difference(last, golden.generated_logits), kTolerance) << "generate";
}

class TinyModel : public testing::TestWithParam<std::string> {};

TEST_P(TinyModel, EqualsTransformers) {
  const std::string folder = golden_path(GetParam());
  expect_golden(folder, concat(folder, "/golden.safetensors"));
}

std::vector<std::string> tiny_models() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden_path(""))) {
    if (entry.is_directory()) names.push_back(entry.path().filename());
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Golden, TinyModel, testing::ValuesIn(tiny_models()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Golden, CoversEveryArchitectureAndRopeKind) {
  EXPECT_GE(tiny_models().size(), 8u);
}

TEST(Golden, NanoEqualsTransformers) {
  expect_golden(nano_folder(), golden_path("nano.safetensors"));
}

// bfloat16 has 8 bits of mantissa: logits (deviation 3.8) may be off by a few times 2^-8 of that.
TEST(Golden, NanoInBfloat16IsClose) {
  const Golden golden = read_golden(golden_path("nano.safetensors"));
  RunnerOptions options;
  options.dtype = DType::kBF16;
  const auto runner = load_runner(nano_folder(), options);
  const auto vocab = static_cast<size_t>(runner->config().description.vocab_size);
  const auto last = static_cast<size_t>(golden.positions[1]);
  const auto all = logits_of(*runner, std::span(golden.tokens).first(last + 1));
  const auto logits = std::span(all).last(vocab);
  const auto expected = std::span(golden.logits).subspan(vocab, vocab);
  EXPECT_LT(largest_difference(logits, expected), 0.5);
  EXPECT_GT(largest_difference(logits, expected), 1e-4) << "this ran in float32";
}

}  // namespace
}  // namespace sqz
