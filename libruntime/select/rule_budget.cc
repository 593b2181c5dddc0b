#include <cmath>

#include "libruntime/select/rule.h"

namespace sqz {
namespace {

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

std::unique_ptr<Rule> make_budget_rule(LogThresholds log_thresholds,
                                       std::vector<std::vector<float>> head_keep,
                                       int64_t kv_heads) {
  return std::make_unique<BudgetRule>(std::move(log_thresholds), std::move(head_keep), kv_heads);
}

}  // namespace sqz
