#include <algorithm>
#include <cmath>

#include "libruntime/select/rule.h"

namespace sqz {
namespace {

class BudgetRule final : public Rule {
 public:
  BudgetRule(LogThresholds log_thresholds, std::vector<std::vector<float>> shares, int64_t kv_heads)
      : filter_(make_threshold_rule(std::move(log_thresholds))),
        shares_(std::move(shares)),
        kv_heads_(kv_heads) {}

  void choose(const Choice& choice, std::span<uint32_t> order,
              std::span<uint8_t> chosen) const override {
    const double share = shares_[choice.scope][choice.layer * kv_heads_ + choice.kv_head];
    const int64_t wanted = std::llround(share * static_cast<double>(choice.keys));
    if (!choice.finest) {
      filter_->choose(choice, order, chosen);
      int64_t kept = 0;
      for (size_t i = 0; i < chosen.size(); ++i) kept += chosen[i] != 0 ? choice.sizes[i] : 0;
      if (kept >= wanted) return;
    }
    fill(choice, wanted, order, chosen);
  }

 private:
  // Best first; a selection by halves instead of a sort, since only the border matters.
  static void fill(const Choice& choice, int64_t wanted, std::span<uint32_t> order,
                   std::span<uint8_t> chosen) {
    const auto& scores = choice.scores;
    const auto& sizes = choice.sizes;
    int64_t high = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (scores[i] > -INFINITY) order[high++] = static_cast<uint32_t>(i);
    }
    std::fill(chosen.begin(), chosen.end(), uint8_t{0});
    const auto better = [&](uint32_t a, uint32_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    const auto begin = order.begin();
    int64_t low = 0, left = wanted;
    const int64_t all = high;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      std::nth_element(begin + low, begin + middle, begin + high, better);
      int64_t keys = 0;
      for (int64_t i = low; i < middle; ++i) keys += sizes[order[i]];
      if (keys <= left) {
        left -= keys;
        low = middle;
      } else {
        high = middle;
      }
    }
    // order[0 .. low) fits; order[low] crosses the border (or is the last one).
    if (low < all) {
      const int64_t next = sizes[order[low]];
      if (choice.finest ? 2 * left > next : left > 0) ++low;
    }
    for (int64_t i = 0; i < low; ++i) chosen[order[i]] = 1;
  }

  std::unique_ptr<Rule> filter_;
  std::vector<std::vector<float>> shares_;
  int64_t kv_heads_;
};

}  // namespace

std::unique_ptr<Rule> make_budget_rule(LogThresholds log_thresholds,
                                       std::vector<std::vector<float>> shares, int64_t kv_heads) {
  return std::make_unique<BudgetRule>(std::move(log_thresholds), std::move(shares), kv_heads);
}

}  // namespace sqz
