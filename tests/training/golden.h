// The results of a model that scripts/make_goldens.py stored, and differences to them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/safetensors.h"
#include "tests/common/must.h"
#include "training/runner.h"

namespace sqz {

struct Golden {
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<float> logits;  // [positions, vocab]
  std::vector<int32_t> prompt;
  std::vector<int32_t> generated;
  std::vector<float> generated_logits;  // of the last rows that chose a token
};

inline std::string golden_path(std::string_view name) {
  return concat(SQZ_SOURCE_DIR "/tests/golden/logits/", name);
}
inline std::string nano_folder() {
  return SQZ_SOURCE_DIR "/examples/models/nano";
}

template <class T>
std::vector<T> golden_tensor(const ReadFile& file, const SafetensorsHeader& header,
                             const char* name) {
  const TensorInfo* info = header.find(name);
  std::vector<T> out(info->bytes / sizeof(T));
  EXPECT_TRUE(file.read(info->offset, std::as_writable_bytes(std::span(out))).ok()) << name;
  return out;
}

inline Golden read_golden(const std::string& path) {
  const auto file = must(Env::posix().open_read(path));
  const auto header = must(read_safetensors_header(*file));
  Golden golden;
  golden.tokens = golden_tensor<int32_t>(*file, header, "tokens");
  for (int32_t p : golden_tensor<int32_t>(*file, header, "positions")) {
    golden.positions.push_back(p);
  }
  golden.logits = golden_tensor<float>(*file, header, "logits");
  const auto length = golden_tensor<int32_t>(*file, header, "prompt").at(0);
  golden.prompt.assign(golden.tokens.begin(), golden.tokens.begin() + length);
  golden.generated = golden_tensor<int32_t>(*file, header, "generated");
  golden.generated_logits = golden_tensor<float>(*file, header, "generated_logits");
  return golden;
}

// NaN counts as infinitely far.
inline double largest_difference(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double{a[i]} - double{b[i]});
    worst = difference <= worst ? worst : std::isnan(difference) ? INFINITY : difference;
  }
  return worst;
}

inline std::unique_ptr<Runner> load_runner(const std::string& folder, RunnerOptions options = {}) {
  if (options.threads == 0) options.threads = 2;
  return must(Runner::load(folder, options));
}

// Logits [tokens, vocab] of a text by itself.
inline std::vector<float> logits_of(Runner& runner, std::span<const int32_t> tokens) {
  GenerateOptions none;
  none.max_tokens = 0;
  std::vector<float> out;
  must(runner.generate(tokens, none, nullptr, &out));
  return out;
}

}  // namespace sqz
