#include <cmath>

#include "libruntime/select/rule.h"

namespace sqz {
namespace {

class ThresholdRule final : public Rule {
 public:
  ThresholdRule(LogThresholds log_thresholds, LogThresholds layer_thresholds)
      : log_thresholds_(std::move(log_thresholds)),
        layer_thresholds_(std::move(layer_thresholds)) {}

  void choose(const Choice& choice, std::span<uint32_t> /*order*/,
              std::span<uint8_t> chosen) const override {
    const float threshold = choice.finest && !layer_thresholds_.empty()
                                ? layer_thresholds_[choice.scope][choice.layer]
                                : log_thresholds_[choice.scope][choice.level];
    for (size_t i = 0; i < choice.scores.size(); ++i) {
      const float score = choice.scores[i];
      chosen[i] = score >= threshold && score > -INFINITY ? 1 : 0;
    }
  }

 private:
  LogThresholds log_thresholds_, layer_thresholds_;
};

}  // namespace

std::unique_ptr<Rule> make_threshold_rule(LogThresholds log_thresholds,
                                          LogThresholds layer_thresholds) {
  return std::make_unique<ThresholdRule>(std::move(log_thresholds), std::move(layer_thresholds));
}

}  // namespace sqz
