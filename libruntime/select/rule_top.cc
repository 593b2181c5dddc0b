#include <algorithm>
#include <cmath>

#include "libruntime/select/rule.h"

namespace sqz {
namespace {

class TopRule final : public Rule {
 public:
  explicit TopRule(std::vector<int64_t> counts) : counts_(std::move(counts)) {}

  void choose(const Choice& choice, std::span<uint32_t> order,
              std::span<uint8_t> chosen) const override {
    const auto& scores = choice.scores;
    int64_t n = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (scores[i] > -INFINITY) order[n++] = static_cast<uint32_t>(i);
    }
    const int64_t count = std::min(counts_[choice.layer], n);
    if (count < n) {
      std::nth_element(order.begin(), order.begin() + count, order.begin() + n,
                       [&](uint32_t a, uint32_t b) {
                         return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                       });
    }
    std::fill(chosen.begin(), chosen.end(), uint8_t{0});
    for (int64_t i = 0; i < count; ++i) chosen[order[i]] = 1;
  }

 private:
  std::vector<int64_t> counts_;
};

}  // namespace

std::unique_ptr<Rule> make_top_rule(std::vector<int64_t> counts) {
  return std::make_unique<TopRule>(std::move(counts));
}

}  // namespace sqz
