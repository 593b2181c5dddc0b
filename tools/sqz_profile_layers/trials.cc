#include "tools/sqz_profile_layers/trials.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tools/common/index_context.h"
#include "tools/common/selector_options.h"

namespace sqz {
namespace {

// Times the keys of the budget asked for: where a layer's error is measured.
constexpr std::array kTimes = {0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.5};
constexpr size_t kOnce = 4;

Result<std::unique_ptr<IndexContext>> open(const Trial& trial, const SelectorOptions& selector,
                                           int threads) {
  sqz_session_options options = session_options(selector, threads);
  options.max_tokens = std::max(kMaxContextTokens, std::ssize(trial.held_out));
  return IndexContext::open(trial.index, options);
}

double squared_distance(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = double{a[i]} - double{b[i]};
    sum += difference * difference;
  }
  return sum;
}

}  // namespace

// Sums over trials of one layer at each of kTimes.
struct Trials::Curve {
  std::array<double, kTimes.size()> error{}, read{}, possible{};
  double norm = 0;

  double kept(size_t i) const { return possible[i] > 0 ? read[i] / possible[i] : 1; }
  double relative_error(size_t i) const { return norm > 0 ? error[i] / norm : 0; }
};

Result<TrialLosses> Trials::run(const SelectorOptions& selector) const {
  TrialLosses out;
  Reads reads;
  for (const Trial& trial : trials_) {
    SQZ_ASSIGN_OR_RETURN(const auto context, open(trial, selector, threads_));
    SQZ_ASSIGN_OR_RETURN(const auto nats, runner_.score(trial.held_out, *context, {}));
    out.nats.insert(out.nats.end(), nats.begin(), nats.end());
    SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, context->stats());
    reads.add(stats);
  }
  out.budget = reads.delivered_budget();
  out.keep = reads.delivered_keep();
  return out;
}

Status Trials::check_budget() const {
  SelectorOptions uniform = selector_;
  uniform.layers = kUniformLayers;
  for (const Trial& trial : trials_) {
    const auto context = open(trial, uniform, threads_);
    if (!context.ok()) {  // what is wrong is the option, not the temporary index
      const Status status = context.status();
      const std::string field = trial.index + ": budget:";
      if (!status.message().starts_with(field)) return status;
      return {status.code(), "--budget:" + status.message().substr(field.size())};
    }
    SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, (*context)->stats());
    if (stats.asked_keep > 0) continue;
    return {Code::kInvalidArgument,
            concat("--budget: found ", selector_.budget.value_or(kDefaultBudget),
                   ", expected more than sink, tail and centroids cost in a window; pass a larger "
                   "one, or make the window longer")};
  }
  return {};
}

Result<TrialLosses> Trials::losses(std::span<const double> scales) const {
  SelectorOptions selector = selector_;
  selector.layers = kUniformLayers;
  selector.layer_scales.assign(scales.begin(), scales.end());
  return run(selector);
}

Result<TrialLosses> Trials::dense_losses() const {
  SelectorOptions dense;
  dense.selector = "dense";
  return run(dense);
}

Status Trials::measure_errors(const Trial& trial, double keep, std::vector<Curve>& curves) const {
  std::vector<std::unique_ptr<IndexContext>> sparse;
  for (const double times : kTimes) {
    SelectorOptions selector = selector_;
    selector.layers = kUniformLayers;
    selector.budget.reset();
    selector.keep = std::min(times * keep, 1.0);
    SQZ_ASSIGN_OR_RETURN(sparse.emplace_back(), open(trial, selector, threads_));
  }
  ScoreOptions options;
  options.losses = false;
  options.observer = [&](const ObservedAttention& dense) -> Status {
    Curve& curve = curves[static_cast<size_t>(dense.layer)];
    const auto exact = merged_attention(dense, dense.context_out, dense.context_lse);
    for (const float x : exact) curve.norm += double{x} * double{x};
    for (size_t i = 0; i < sparse.size(); ++i) {
      SQZ_ASSIGN_OR_RETURN(const OtherAttention found, attention_with(*sparse[i], dense));
      curve.error[i] += squared_distance(found.merged, exact);
    }
    return {};
  };
  SelectorOptions all;
  all.selector = "dense";
  SQZ_ASSIGN_OR_RETURN(const auto dense, open(trial, all, threads_));
  SQZ_RETURN_IF_ERROR(runner_.score(trial.held_out, *dense, options).status());
  for (size_t l = 0; l < curves.size(); ++l) {
    for (size_t i = 0; i < sparse.size(); ++i) {
      SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, sparse[i]->stats(static_cast<int64_t>(l)));
      curves[l].read[i] += static_cast<double>(stats.keys_read);
      curves[l].possible[i] += static_cast<double>(stats.keys_possible);
    }
  }
  return {};
}

Result<LayerLosses> Trials::layer_losses(const TrialLosses& dense,
                                         const std::function<void(double)>& progress) const {
  const auto layers = static_cast<size_t>(runner_.config().description.layers);
  std::vector<Curve> curves(layers);
  const double steps = static_cast<double>(layers) + 2;
  for (const Trial& trial : trials_) {
    SelectorOptions uniform = selector_;
    uniform.layers = kUniformLayers;
    SQZ_ASSIGN_OR_RETURN(const auto context, open(trial, uniform, threads_));
    SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, context->stats());
    SQZ_RETURN_IF_ERROR(measure_errors(trial, stats.asked_keep, curves));
  }
  LayerLosses out;
  out.losses.resize(layers);
  for (size_t l = 0; l < layers; ++l) {
    progress((static_cast<double>(l) + 2) / steps);
    const Curve& curve = curves[l];
    out.kept.push_back(curve.kept(kOnce));
    if (out.kept.back() >= 1) {
      out.losses[l].points.push_back({1, 0});
      continue;
    }
    std::vector<double> scales(layers, std::numeric_limits<double>::infinity());
    scales[l] = 1;
    SQZ_ASSIGN_OR_RETURN(const TrialLosses alone, losses(scales));
    double cost = 0;
    for (size_t i = 0; i < dense.nats.size(); ++i) {
      cost += std::pow(alone.nats[i] - dense.nats[i], 2) / 2;
    }
    cost /= static_cast<double>(dense.nats.size());
    for (size_t i = 0; i < kTimes.size(); ++i) {
      const double once = curve.relative_error(kOnce);
      const double share = once > 0 ? curve.relative_error(i) / once : 0;
      out.losses[l].points.push_back({std::min(curve.kept(i), 1.0), cost * share});
    }
  }
  return out;
}

}  // namespace sqz
