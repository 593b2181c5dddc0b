#include "libruntime/select/layer_spread.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sqz {
namespace {

// As asked for, not brought to a mean of 1 yet; empty: all alike.
std::vector<double> wanted_scales(const IndexMetadata& metadata, const SelectionRequest& request) {
  if (!request.layer_scales.empty()) {
    return {request.layer_scales.begin(), request.layer_scales.end()};
  }
  if (request.uniform_layers || !metadata.layer_budgets) return {};
  const std::vector<int64_t>& budget = metadata.layer_budgets->budget;
  return {budget.begin(), budget.end()};
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

std::vector<double> deal(double total, std::span<const double> weights,
                         std::span<const double> caps) {
  std::vector<double> out(weights.size(), 0.0);
  std::vector<bool> full(weights.size(), false);
  // Layers that reach their caps leave more to the others, until no other layer reaches its cap.
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
  // A whole key that a rounding took is given back.
  const auto each = static_cast<int64_t>(plan.asked_keep * static_cast<double>(slots) + 1e-6);
  const int64_t total = layers * each;
  const std::vector<double> caps(plan.layer_keep.size(), static_cast<double>(slots));
  const std::vector<double> dealt = deal(static_cast<double>(total), plan.layer_keep, caps);
  std::vector<int64_t> keys;
  for (const double share : dealt) keys.push_back(static_cast<int64_t>(share + 1e-9));
  // Keys that rounding lost go to the largest remainders; of equal remainders the first layer wins.
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return dealt[a] - static_cast<double>(keys[a]) > dealt[b] - static_cast<double>(keys[b]) + 1e-9;
  });
  int64_t left = total - std::accumulate(keys.begin(), keys.end(), int64_t{0});
  for (const size_t layer : order) {
    const bool more = left > 0 && plan.layer_keep[layer] > 0 && keys[layer] < slots;
    keys[layer] += more;
    left -= more;
  }
  return keys;
}

void spread_head_keep(const IndexMetadata& metadata, SelectionPlan& plan) {
  if (std::none_of(plan.layer_keep.begin(), plan.layer_keep.end(),
                   [](double scale) { return scale > 0 && std::abs(scale - 1) > 1e-9; })) {
    return;
  }
  const auto heads = static_cast<size_t>(metadata.model.kv_heads);
  const size_t layers = plan.layer_keep.size();
  const std::vector<double> ones(std::max(layers, heads), 1.0);
  for (std::vector<float>& shares : plan.head_keep) {
    std::vector<double> wanted;
    double total = 0;
    for (size_t l = 0; l < layers; ++l) {
      const auto own = std::span(shares).subspan(l * heads, heads);
      const double kept = std::accumulate(own.begin(), own.end(), 0.0) / static_cast<double>(heads);
      wanted.push_back(kept * plan.layer_keep[l]);
      if (plan.layer_keep[l] > 0) total += kept;
    }
    const std::vector<double> dealt = deal(total, wanted, std::span(ones).first(layers));
    for (size_t l = 0; l < layers; ++l) {
      if (plan.layer_keep[l] == 0) continue;
      const auto own = std::span(shares).subspan(l * heads, heads);
      const std::vector<double> weights(own.begin(), own.end());
      const auto kept =
          deal(dealt[l] * static_cast<double>(heads), weights, std::span(ones).first(heads));
      std::transform(kept.begin(), kept.end(), own.begin(),
                     [](double share) { return static_cast<float>(share); });
    }
  }
}

}  // namespace sqz
