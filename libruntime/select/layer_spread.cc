#include "libruntime/select/layer_spread.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sqz {
namespace {

using C = Calibration;

// As asked for, not brought to a mean of 1 yet; empty: all alike.
std::vector<double> wanted_scales(const IndexMetadata& metadata, const SelectionRequest& request) {
  if (!request.layer_scales.empty()) {
    return {request.layer_scales.begin(), request.layer_scales.end()};
  }
  if (request.uniform_layers || !metadata.layer_budgets) return {};
  const std::vector<int64_t>& budget = metadata.layer_budgets->budget;
  return {budget.begin(), budget.end()};
}

// The share of a layer's keys at a place of the calibrated curve, mean over its heads.
class LayerCurve {
 public:
  LayerCurve(const IndexMetadata& metadata, const std::vector<float>& shares, int scope,
             int64_t layer)
      : heads_(metadata.model.kv_heads),
        rows_(shares.data() + (scope * metadata.model.layers + layer) * heads_ * C::kGrid) {}

  double operator()(double keep) const {
    const GridPoint at = grid_point(keep);
    return mean(at.low) + at.fraction * (mean(at.low + 1) - mean(at.low));
  }

  // The least `keep` at which the layer keeps `share`: the curve never falls.
  double place_of(double share) const {
    int64_t low = 0, high = C::kGrid - 1;
    if (mean(high) <= share) return 1;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (mean(middle) < share ? low : high) = middle;
    }
    const double rise = mean(high) - mean(low);
    const double part = rise > 0 ? (share - mean(low)) / rise : 0;
    return (static_cast<double>(low) + std::clamp(part, 0.0, 1.0)) /
           static_cast<double>(C::kGrid - 1);
  }

 private:
  double mean(int64_t i) const {
    double sum = 0;
    for (int64_t h = 0; h < heads_; ++h) sum += double{rows_[h * C::kGrid + i]};
    return sum / static_cast<double>(heads_);
  }

  int64_t heads_;
  const float* rows_;  // [kv_heads, kGrid]
};

// natural[l] is what a layer keeps with all scales alike; the total stays.
std::vector<double> scaled(std::span<const double> natural, std::span<const double> caps,
                           const SelectionPlan& plan) {
  std::vector<double> weights;
  double total = 0;
  for (size_t l = 0; l < natural.size(); ++l) {
    weights.push_back(natural[l] * plan.layer_keep[l]);
    if (plan.layer_keep[l] > 0) total += natural[l];
  }
  return deal(total, weights, caps);
}

}  // namespace

Result<std::vector<double>> layer_scales(const IndexMetadata& metadata,
                                         std::span<const LayerView> layers,
                                         const SelectionRequest& request, int dense_layers) {
  std::vector<double> scales = wanted_scales(metadata, request);
  if (scales.empty()) scales.assign(layers.size(), 1.0);
  if (scales.size() != layers.size()) {
    return Status(Code::kInvalidArgument,
                  concat("layer_scales: found ", scales.size(), ", expected ", layers.size(),
                         ", one for each layer of the model"));
  }
  double sum = 0, count = 0;
  for (size_t l = 0; l < scales.size(); ++l) {
    if (!(scales[l] > 0)) {
      return Status(Code::kInvalidArgument,
                    concat("layer_scales[", l, "]: found ", scales[l], ", expected more than 0"));
    }
    const bool whole = std::cmp_less(l, dense_layers) || std::isinf(scales[l]);
    if (whole || layers[l].slots == 0) {
      scales[l] = 0;
      continue;
    }
    sum += scales[l];
    ++count;
  }
  for (double& scale : scales) scale *= count / std::max(sum, 1e-300);
  return scales;
}

bool is_spread(std::span<const double> scales) {
  return std::any_of(scales.begin(), scales.end(),
                     [](double scale) { return scale > 0 && std::abs(scale - 1) > 1e-9; });
}

std::vector<double> deal(double total, std::span<const double> weights,
                         std::span<const double> caps) {
  std::vector<double> out(weights.size(), 0.0);
  std::vector<bool> full(weights.size(), false);
  // Those that reach their caps leave more to the others, until no other one does.
  for (bool again = true; again;) {
    again = false;
    double left = total, sum = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      left -= full[i] ? out[i] : 0;
      sum += full[i] ? 0 : weights[i];
    }
    if (!(left > 0) || !(sum > 0)) return out;
    for (size_t i = 0; i < out.size(); ++i) {
      if (full[i] || weights[i] == 0) continue;
      out[i] = std::min(left * (weights[i] / sum), caps[i]);
      full[i] = out[i] == caps[i];
      again |= full[i];
    }
  }
  return out;
}

std::vector<int64_t> layer_keys(const SelectionPlan& plan, int64_t slots) {
  const auto layers = std::count_if(plan.layer_keep.begin(), plan.layer_keep.end(),
                                    [](double scale) { return scale > 0; });
  const int64_t total = layers * whole_keys(plan, slots);
  const std::vector<double> caps(plan.layer_keep.size(), static_cast<double>(slots));
  const std::vector<double> dealt = deal(static_cast<double>(total), plan.layer_keep, caps);
  std::vector<int64_t> keys;
  for (const double share : dealt) keys.push_back(static_cast<int64_t>(share + 1e-9));
  // What whole keys lose goes to the largest remainders, of equal ones to the first layer.
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return dealt[a] - static_cast<double>(keys[a]) > dealt[b] - static_cast<double>(keys[b]) + 1e-9;
  });
  int64_t left = total - std::accumulate(keys.begin(), keys.end(), int64_t{0});
  while (left > 0) {
    const int64_t before = left;
    for (const size_t layer : order) {
      if (left == 0 || plan.layer_keep[layer] == 0 || keys[layer] == slots) continue;
      ++keys[layer];
      --left;
    }
    if (left == before) break;
  }
  return keys;
}

void spread_thresholds(const IndexMetadata& metadata, const Curves& curves, SelectionPlan& plan) {
  if (!is_spread(plan.layer_keep)) return;
  const auto layers = static_cast<int64_t>(plan.layer_keep.size());
  for (int scope = 0; scope < C::kScopes; ++scope) {
    std::vector<double> natural, caps;
    for (int64_t l = 0; l < layers; ++l) {
      const LayerCurve curve(metadata, *curves.shares, scope, l);
      natural.push_back(curve(plan.asked_keep));
      caps.push_back(curve(curves.most));
    }
    const std::vector<double> kept = scaled(natural, caps, plan);
    std::vector<float> thresholds;
    for (int64_t l = 0; l < layers; ++l) {
      const LayerCurve curve(metadata, *curves.shares, scope, l);
      const bool spread = plan.layer_keep[static_cast<size_t>(l)] > 0;
      const double place = spread
                               ? std::min(curve.place_of(kept[static_cast<size_t>(l)]), curves.most)
                               : plan.asked_keep;
      thresholds.push_back(calibrated_threshold(curves.thresholds[scope], place));
    }
    plan.layer_thresholds.push_back(std::move(thresholds));
  }
}

void spread_head_keep(const IndexMetadata& metadata, SelectionPlan& plan) {
  if (!is_spread(plan.layer_keep)) return;
  const auto heads = static_cast<size_t>(metadata.model.kv_heads);
  const size_t layers = plan.layer_keep.size();
  const std::vector<double> ones(std::max(layers, heads), 1.0);
  for (std::vector<float>& shares : plan.head_keep) {
    const std::span<float> all(shares);
    std::vector<double> natural;
    for (size_t l = 0; l < layers; ++l) {
      const auto own = all.subspan(l * heads, heads);
      natural.push_back(std::accumulate(own.begin(), own.end(), 0.0) / static_cast<double>(heads));
    }
    const std::vector<double> kept = scaled(natural, std::span(ones).first(layers), plan);
    for (size_t l = 0; l < layers; ++l) {
      if (plan.layer_keep[l] == 0) continue;
      const auto own = all.subspan(l * heads, heads);
      const std::vector<double> weights(own.begin(), own.end());
      const auto dealt =
          deal(kept[l] * static_cast<double>(heads), weights, std::span(ones).first(heads));
      std::transform(dealt.begin(), dealt.end(), own.begin(),
                     [](double share) { return static_cast<float>(share); });
    }
  }
}

}  // namespace sqz
