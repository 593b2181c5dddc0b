// From what a host asks for (a budget, a fraction of keys, thresholds) to the numbers that rules
// work with, through the calibration that the index carries.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/select/rule.h"

namespace sqz {

enum class SelectorKind { kSqueezed, kDense };
enum class RuleKind { kThreshold, kBudget };

// At most one of budget, keep and thresholds is given; see sqz_session_options for their meaning.
struct SelectionRequest {
  SelectorKind selector = SelectorKind::kSqueezed;
  RuleKind rule = RuleKind::kThreshold;
  int group = 0;  // as in Calibration
  bool estimate = false;
  int levels = 0;  // 0 = all
  double budget = 0;
  double keep = 0;
  const double* thresholds = nullptr;  // [levels in use], T
};

struct SelectionPlan {
  bool dense = false;     // read everything
  bool fallback = false;  // dense although selection was asked for: there is nothing to gain
  int levels = 0;         // in use
  double asked_budget = 1;
  double asked_keep = 1;  // both 0 if thresholds were given: what they read is not known before
  LogThresholds log_thresholds;            // [scope][level in use]
  std::vector<std::vector<float>> shares;  // [scope][layer * kv_heads + head]; rule kBudget only
};

// What a sparse layer costs, in units of one key and its value; the same for all sparse layers.
// A centroid or a value mean is half a unit. See docs/runtime.md, "Budget".
struct BudgetModel {
  int64_t tokens = 0;            // M + E
  int64_t clustered = 0;         // M
  std::vector<double> clusters;  // per level in use, averaged over layers
  std::vector<double> survive;   // fraction of the keys alive at each level in use; the first is 1
  bool estimate = false;

  double fixed_cost() const;  // everything but what depends on keep
  double per_keep() const;    // cost = fixed_cost() + keep * per_keep()
};

// `path` opens messages. kInvalidArgument for a request that makes no sense or a budget that cannot
// be met; the message has the least one that can. A context below kShortContext tokens for which
// the budget cannot be met runs dense instead.
inline constexpr int64_t kShortContext = 4096;
Result<SelectionPlan> plan_selection(const IndexMetadata& metadata,
                                     const std::vector<LayerView>& layers,
                                     const Calibration& calibration,
                                     const SelectionRequest& request, const std::string& path);

// The value of a calibrated table at `keep`: linear between grid points, and the neighbour's where
// one of the two stands for "beyond every score".
float calibrated_threshold(const float* grid, double keep);

}  // namespace sqz
