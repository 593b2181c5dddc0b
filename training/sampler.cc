#include "training/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sqz::training {

int32_t Sampler::next(std::span<const float> logits) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (temperature_ == 0) return static_cast<int32_t>(best - logits.begin());

  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  weights_.clear();
  double total = 0;
  for (int32_t id : order_) {
    const double logit = logits[static_cast<size_t>(id)];
    weights_.push_back(std::exp((logit - double{*best}) / temperature_));
    total += weights_.back();
  }
  size_t kept = 0;
  double mass = 0;
  while (kept < weights_.size() && (kept == 0 || mass < top_p_ * total)) mass += weights_[kept++];

  // Not std::uniform_real_distribution: what it returns differs between standard libraries.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * mass;
  for (size_t i = 0; i < kept; ++i) {
    left -= weights_[i];
    if (left < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace sqz::training
