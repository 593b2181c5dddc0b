// Figures of measurements: means with standard errors, relative errors, shares that were read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sqz/sqz.h"
#include "training/runner.h"

namespace sqz {

// The mean of the values of independent trials; 0 if there are none.
double mean(std::span<const double> values);
// The mean's error: the sample's standard deviation / sqrt(n); 0 if there are fewer than two.
double standard_error(std::span<const double> values);
// The error of a fraction p of n trials: sqrt(p (1 - p) / n).
double binomial_error(double fraction, int64_t trials);

// a - b, pair by pair. Both have the same size.
std::vector<double> difference(std::span<const double> a, std::span<const double> b);

// The means of whole runs of `block` values. A shorter run at the end is left out, unless it is the
// only one.
std::vector<double> block_means(std::span<const double> values, int64_t block);

// ||a - b|| / ||b||; 0 if both are 0, infinity if only b is.
double relative_error(std::span<const float> a, std::span<const float> b);

// [T, Hq, d]: attention over all keys, from a state over the context, `out` [T, Hq, d] with `lse`
// [T, Hq], and the state over the tokens since in `seen`. An lse of -infinity means no key.
std::vector<float> merged_attention(const ObservedAttention& seen, const float* out,
                                    const float* lse);

struct OtherAttention {
  std::vector<float> merged;  // [T, Hq, d]: merged_attention()
  std::vector<float> lse;     // [T, Hq] over the context
};
// The layer's attention with `context` in place of the context that answered.
Result<OtherAttention> attention_with(FixedContext& context, const ObservedAttention& seen);

// exp(lse - dense_lse): the part of the dense softmax's mass on the keys that were read; 1 if no
// key is there.
double recalled_mass(float lse, float dense_lse);

// Sums of sqz_stats over sessions.
struct Reads {
  double asked_budget = 0, asked_keep = 0;  // of the last session: the same for all, but for
                                            // rounding by the context's length
  bool dense_fallback = false;              // of any session
  uint64_t keys_read = 0, keys_possible = 0, bytes_read = 0, bytes_dense = 0;
  double lowest = 1, highest = 0;  // delivered budget of a session

  void add(const sqz_stats& stats);
  double delivered_budget() const;  // 0 if nothing was served
  double delivered_keep() const;
};

}  // namespace sqz
