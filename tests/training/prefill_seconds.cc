// Prints the seconds of dense passes over a text, for tests/bench/prefill_vs_transformers.py:
//   sqz_prefill_seconds MODEL TOKENS.npy f32|bf16 THREADS REPEATS
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "formats/npy.h"
#include "training/runner.h"

namespace {

int run(char** arguments) {
  auto fail = [](const sqz::Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  };
  const auto tokens = sqz::read_npy_tokens(sqz::Env::posix(), arguments[2]);
  if (!tokens.ok()) return fail(tokens.status());
  sqz::RunnerOptions options;
  options.dtype = std::string(arguments[3]) == "bf16" ? sqz::DType::kBF16 : sqz::DType::kF32;
  options.threads = std::atoi(arguments[4]);
  const auto runner = sqz::Runner::load(arguments[1], options);
  if (!runner.ok()) return fail(runner.status());
  sqz::PrefillOptions prefill;
  prefill.logit_positions = {static_cast<int64_t>(tokens->size()) - 1};
  for (int i = std::atoi(arguments[5]); i > 0; --i) {
    const auto start = std::chrono::steady_clock::now();
    const auto logits = (*runner)->prefill(*tokens, prefill);
    if (!logits.ok()) return fail(logits.status());
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::printf("%.4f\n", taken.count());
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::fprintf(stderr, "peak memory %.0f MiB\n", static_cast<double>(usage.ru_maxrss) / 1024);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 6) return run(arguments);
  std::fprintf(stderr, "usage: sqz_prefill_seconds MODEL TOKENS.npy f32|bf16 THREADS REPEATS\n");
  return 2;
}
