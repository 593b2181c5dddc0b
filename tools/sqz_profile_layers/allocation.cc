#include "tools/sqz_profile_layers/trials.h"

#include <array>
#include <cmath>
#include <numeric>

namespace sqz {
namespace {

constexpr int64_t kStretch = 128;  // tokens of one sample of a gain
constexpr std::array kStrengths = {1.0, 0.5};

// Layers that keep no key at the least budget measured would never get one.
constexpr double kLeastScale = 1e-3;

// Uniform first.
std::vector<Candidate> candidates(const LayerLosses& losses, const BudgetRequest& budget) {
  const double total = std::accumulate(losses.kept.begin(), losses.kept.end(), 0.0);
  const std::vector<double> keys = least_loss_keys(losses.losses, total);
  std::vector<Candidate> out(1);
  out[0].budget.assign(losses.kept.size(), budget.budget);
  for (const double strength : kStrengths) {
    std::vector<double> scales;
    for (size_t l = 0; l < keys.size(); ++l) {
      // A layer that is read whole, or that keeps nothing at this budget, cannot be scaled.
      const bool fixed = losses.kept[l] >= 1 || losses.kept[l] <= 0;
      const double scale = fixed ? 1 : std::max(keys[l] / losses.kept[l], kLeastScale);
      scales.push_back(std::pow(scale, strength));
    }
    Candidate& candidate = out.emplace_back();
    candidate.strength = strength;
    candidate.budget = scaled_budgets(scales, budget);
  }
  return out;
}

}  // namespace

std::string Candidate::name() const {
  if (strength == 0) return "uniform";
  return strength == 1 ? "measured" : concat("measured, strength ", strength);
}

const Candidate& Comparison::best() const {
  const Candidate* best = &candidates.front();
  for (const Candidate& candidate : candidates) {
    const bool sure = mean(candidate.gain) > standard_error(candidate.gain);
    if (sure && candidate.loss < best->loss) best = &candidate;
  }
  return *best;
}

Result<Comparison> compare_allocations(const Trials& trials, const BudgetRequest& budget,
                                       const std::function<void(double)>& progress) {
  constexpr double kPart = 0.6;  // of the time: the layers' own losses
  Comparison out;
  SQZ_RETURN_IF_ERROR(trials.check_budget());
  SQZ_ASSIGN_OR_RETURN(const TrialLosses dense, trials.dense_losses());
  out.dense_loss = mean(dense.nats);
  SQZ_ASSIGN_OR_RETURN(const LayerLosses losses,
                       trials.layer_losses(dense, [&](double done) { progress(kPart * done); }));
  out.candidates = candidates(losses, budget);
  std::vector<double> uniform_nats;
  for (size_t i = 0; i < out.candidates.size(); ++i) {
    Candidate& candidate = out.candidates[i];
    const std::vector<double> scales(candidate.budget.begin(), candidate.budget.end());
    SQZ_ASSIGN_OR_RETURN(const TrialLosses found,
                         trials.losses(i == 0 ? std::span<const double>() : scales));
    candidate.loss = mean(found.nats);
    candidate.delivered = found.budget;
    if (i == 0) uniform_nats = found.nats;
    candidate.gain = block_means(difference(uniform_nats, found.nats), kStretch);
    progress(kPart +
             (1 - kPart) * static_cast<double>(i + 1) / static_cast<double>(out.candidates.size()));
  }
  return out;
}

JsonText comparison_json(const Comparison& comparison) {
  std::vector<JsonText> out;
  for (const Candidate& candidate : comparison.candidates) {
    out.push_back({{"name", candidate.name()},
                   {"loss", candidate.loss},
                   {"gain", mean(candidate.gain)},
                   {"gain_stderr", standard_error(candidate.gain)},
                   {"delivered", candidate.delivered},
                   {"budget", candidate.budget}});
  }
  return out;
}

}  // namespace sqz
