// Picks the next token from logits: greedy, or sampled at a temperature from the smallest set of
// tokens whose probability reaches top_p. The same seed gives the same tokens on every machine.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace sqz::training {

class Sampler {
 public:
  // temperature 0: greedy; ties go to the lowest id. 0 < top_p <= 1.
  Sampler(double temperature, double top_p, uint64_t seed)
      : temperature_(temperature), top_p_(top_p), random_(seed) {}

  int32_t next(std::span<const float> logits);  // finite, not empty

 private:
  double temperature_, top_p_;
  std::mt19937_64 random_;
  std::vector<int32_t> order_;
  std::vector<double> weights_;
};

}  // namespace sqz::training
