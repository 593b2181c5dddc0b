#include <algorithm>
#include <array>
#include <cmath>

#include "libruntime/select/rule.h"

namespace sqz {
namespace {

constexpr uint32_t kBuckets = 1024;

// Buckets of 1/32 nat from a score of 1 down, the best ones first. Never lower for a lower score;
// kBuckets for -infinity.
void find_buckets(std::span<const float> scores, std::span<uint32_t> buckets) {
  for (size_t i = 0; i < scores.size(); ++i) {
    const float bucket = std::clamp(scores[i] * -32.0f, 0.0f, float{kBuckets - 1});
    buckets[i] =
        scores[i] > -INFINITY ? static_cast<uint32_t>(static_cast<int32_t>(bucket)) : kBuckets;
  }
}

// The best of `order`, more than `left` keys in all. A selection by halves instead of a sort,
// since only its k-th key matters.
void fill_threshold_bucket(const Choice& choice, int64_t left, std::span<uint32_t> order,
                           std::span<uint8_t> chosen) {
  const auto& scores = choice.scores;
  const auto better = [&](uint32_t a, uint32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  const auto begin = order.begin();
  int64_t low = 0, high = std::ssize(order);
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(begin + low, begin + middle, begin + high, better);
    int64_t keys = 0;
    for (int64_t i = low; i < middle; ++i) keys += choice.sizes[order[i]];
    if (keys <= left) {
      left -= keys;
      low = middle;
    } else {
      high = middle;
    }
  }
  // order[0 .. low) fits, order[low] does not fit whole.
  const int64_t next = choice.sizes[order[low]];
  if (choice.finest ? 2 * left > next : left > 0) ++low;
  for (int64_t i = 0; i < low; ++i) chosen[order[i]] = 1;
}

class BudgetRule final : public Rule {
 public:
  BudgetRule(LogThresholds log_thresholds, std::vector<std::vector<float>> head_keep,
             int64_t kv_heads)
      : filter_(make_threshold_rule(std::move(log_thresholds))),
        head_keep_(std::move(head_keep)),
        kv_heads_(kv_heads) {}

  void choose(const Choice& choice, std::span<uint32_t> order,
              std::span<uint8_t> chosen) const override {
    const double keep = head_keep_[choice.scope][choice.layer * kv_heads_ + choice.kv_head];
    const int64_t wanted = std::llround(keep * static_cast<double>(choice.keys));
    if (!choice.finest) {
      filter_->choose(choice, order, chosen);
      int64_t kept = 0;
      for (size_t i = 0; i < chosen.size(); ++i) kept += chosen[i] != 0 ? choice.sizes[i] : 0;
      if (kept >= wanted) return;
    }
    choose_best(choice, wanted, order, chosen);
  }

 private:
  std::unique_ptr<Rule> filter_;
  std::vector<std::vector<float>> head_keep_;
  int64_t kv_heads_;
};

}  // namespace

// Best first. Only the bucket in which the wanted keys run out is looked at closely.
void choose_best(const Choice& choice, int64_t wanted, std::span<uint32_t> order,
                 std::span<uint8_t> chosen) {
  const size_t n = choice.scores.size();
  find_buckets(choice.scores, order);
  std::array<uint32_t, kBuckets + 1> keys{};
  for (size_t i = 0; i < n; ++i) keys[order[i]] += choice.sizes[i];
  int64_t left = wanted;
  uint32_t kth = 0;  // the bucket of the k-th best key
  while (kth < kBuckets && keys[kth] <= left) left -= keys[kth++];
  for (size_t i = 0; i < n; ++i) chosen[i] = order[i] < kth ? 1 : 0;
  if (kth == kBuckets) return;
  size_t tied = 0;
  for (size_t i = 0; i < n; ++i) {
    if (order[i] == kth) order[tied++] = static_cast<uint32_t>(i);
  }
  fill_threshold_bucket(choice, left, order.first(tied), chosen);
}

std::unique_ptr<Rule> make_budget_rule(LogThresholds log_thresholds,
                                       std::vector<std::vector<float>> head_keep,
                                       int64_t kv_heads) {
  return std::make_unique<BudgetRule>(std::move(log_thresholds), std::move(head_keep), kv_heads);
}

}  // namespace sqz
