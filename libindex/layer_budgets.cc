#include "libindex/layer_budgets.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace sqz {
namespace {

constexpr int kLast = kLayerGroups - 1;

Status check_cosines(std::span<const double> cosines) {
  for (size_t i = 0; i < cosines.size(); ++i) {
    if (!(std::abs(cosines[i]) <= 1)) {
      return {Code::kInvalidArgument,
              concat("cosine of layer ", i, ": found ", cosines[i], ", expected one in [-1, 1]")};
    }
  }
  if (std::ssize(cosines) < kLayerGroups) {
    return {Code::kInvalidArgument, concat("layers: found ", cosines.size(), ", expected at least ",
                                           kLayerGroups, ", one a group")};
  }
  return {};
}

// The sum of squared distances to the mean.
double spread(std::span<const double> values) {
  const double mean =
      std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return sum;
}

// Where the second and the third of the groups begin whose spreads have the least sum, in ascending
// values.
std::pair<size_t, size_t> best_split(std::span<const double> values) {
  std::pair<size_t, size_t> best;
  double least = std::numeric_limits<double>::infinity();
  for (size_t last = 2; last < values.size(); ++last) {
    const double rest = spread(values.subspan(last));
    for (size_t middle = 1; middle < last; ++middle) {
      const double sum =
          spread(values.first(middle)) + spread(values.subspan(middle, last - middle)) + rest;
      if (sum >= least) continue;
      least = sum;
      best = {middle, last};
    }
  }
  return best;
}

// `total` dealt to `layers` as evenly as whole keys allow, none above `most`; what is left over is
// returned.
int64_t deal(int64_t total, int64_t most, std::span<const size_t> layers,
             std::vector<int64_t>& budgets) {
  const int64_t n = std::ssize(layers);
  const int64_t dealt = std::min(total, n * most);
  for (int64_t i = 0; i < n; ++i) budgets[layers[i]] = dealt / n + (i < dealt % n ? 1 : 0);
  return total - dealt;
}

}  // namespace

Result<std::vector<int>> group_layers(std::span<const double> cosines) {
  SQZ_RETURN_IF_ERROR(check_cosines(cosines));
  std::vector<size_t> order(cosines.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return cosines[a] < cosines[b]; });
  std::vector<double> sorted;
  for (const size_t layer : order) sorted.push_back(cosines[layer]);
  int64_t different = 1;
  for (size_t i = 1; i < sorted.size(); ++i) different += sorted[i] != sorted[i - 1];
  if (different < kLayerGroups) {
    return Status(
        Code::kInvalidArgument,
        concat("cosines: found ", different, " different ", different == 1 ? "one" : "ones", " in ",
               cosines.size(), " layers, expected at least ", kLayerGroups,
               ": layers that are alike cannot be grouped; keep the uniform budget"));
  }
  const auto [middle, last] = best_split(sorted);
  std::vector<int> groups(cosines.size());
  for (size_t i = 0; i < order.size(); ++i) groups[order[i]] = (i >= middle) + (i >= last);
  return groups;
}

Result<std::vector<int64_t>> layer_budgets(std::span<const int> groups,
                                           const BudgetRequest& request) {
  const auto refuse = [](const char* field, const auto& found, const auto&... expected) {
    return Status(Code::kInvalidArgument,
                  concat(field, ": found ", found, ", expected ", expected...));
  };
  const int64_t budget = request.budget;
  if (request.context < 1) return refuse("context", request.context, "at least 1 key");
  if (budget < 1 || budget > request.context) {
    return refuse("budget", budget, "1 .. ", request.context, " keys, what a layer has");
  }
  if (!(request.p > 0 && request.p <= 1)) return refuse("p", request.p, "a number in (0, 1]");
  const int64_t shrunk = std::llround(request.p * static_cast<double>(budget));
  if (shrunk < 1) {
    return refuse("p", request.p, "one that leaves a layer of ", budget, " keys at least one");
  }
  std::vector<size_t> last, others;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i] < 0 || groups[i] > kLast) {
      return refuse("group", groups[i], "0 .. ", kLast, " (layer ", i, ")");
    }
    (groups[i] == kLast ? last : others).push_back(i);
  }
  if (last.empty() || others.empty()) {
    return refuse("groups", last.empty() ? "no layer in the last one" : "no layer in the others",
                  "both");
  }
  std::vector<int64_t> budgets(groups.size(), 0);
  const int64_t total = budget * std::ssize(groups), kept = shrunk * std::ssize(last);
  const int64_t back = deal(total - kept, request.context, others, budgets);
  deal(kept + back, request.context, last, budgets);
  return budgets;
}

}  // namespace sqz
