// From what a host asks for (a budget, a fraction of keys, thresholds) to the numbers that
// selectors and rules work with.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/select/selector.h"

namespace sqz {

// As in sqz.h; each is a row of selector_types() (select/registry.h).
enum class SelectorKind {
  kAuto,  // becomes another one before it is prepared: fitting_selector()
  kSqueezed,
  kDense,
  kQuest,
  kStream,
  kWindow,
  kH2o,
  kSaap
};
enum class RuleKind { kBudget, kThreshold };

// At most one of budget, keep and thresholds is given; see sqz_session_options for their meaning.
struct SelectionRequest {
  SelectorKind selector = SelectorKind::kSqueezed;
  RuleKind rule = RuleKind::kBudget;  // thresholds imply kThreshold
  int levels = 0;                     // 0 = all
  double budget = 0;
  double keep = 0;
  const double* thresholds = nullptr;  // [levels in use], T
  int dense_layers = 0;  // first layers that are read whole: 0 = what the selector wants, -1 = none
  std::span<const double> layer_scales;  // [layers] as in sqz_session_options; may be empty
  bool uniform_layers = false;           // what the index embeds about layers is not used
};

// A selector is made from these. They are borrowed: all but the path outlive the selector.
struct SelectorInputs {
  const IndexMetadata& metadata;
  const Calibration& calibration;
  SelectableIndex index;
  std::string path;  // opens messages
};

// log T of each scope and level in use: log_thresholds[scope][level].
using LogThresholds = std::vector<std::vector<float>>;

struct SelectionPlan {
  bool dense = false;       // read everything
  bool fallback = false;    // dense although selection was asked for: there is nothing to gain
  int levels = 0;           // in use
  double least_budget = 1;  // that selection could deliver; 1 if all layers are dense
  double asked_budget = 1;
  double asked_keep = 1;         // both 0 with thresholds: what they read is not known before
  LogThresholds log_thresholds;  // [scope][level in use]
  // [scope][layer * kv_heads + head] the fraction of its clustered keys that a head keeps; empty by
  // the rule kThreshold and for selectors that count keys.
  std::vector<std::vector<float>> head_keep;
  std::vector<int64_t> layer_pages;  // [layers] pages that a layer reads; empty without pages
  // [layers] the fraction that a layer keeps, divided by the average one; 0: it is read whole.
  // Empty if the plan is dense. See select/layer_spread.h.
  std::vector<double> layer_keep;

  bool selects(int64_t layer) const {
    return !dense && !layer_keep.empty() && layer_keep[static_cast<size_t>(layer)] > 0;
  }
};

// A context below this many tokens for which a budget cannot be met runs dense instead.
inline constexpr int64_t kShortContext = 4096;

// ---- What a sparse layer costs, the mean of all.

// In units of one key and its value of 16 bits, as a function of the fraction of the clustered keys
// that are kept: fixed + keep * per_keep. See docs/runtime.md, "How much is read".
struct ReadingCost {
  double tokens = 0;  // of the layer: the cost of reading everything
  double fixed = 0;   // sink, tail, metadata
  double per_keep = 0;
  double least_keep = 0;              // less cannot be kept
  const char* fixed_names = nullptr;  // "pages, sink and tail", for messages
};

// The cost of a selector that reads nothing to decide: the keys that it keeps, and the exact keys
// but for the first `exact_skipped`.
ReadingCost keys_cost(std::span<const LayerView> layers, int64_t exact_skipped);
// The cost of pages: their bounds are read, and at least one page.
ReadingCost pages_cost(const SelectorInputs& inputs, const SelectionRequest& request,
                       SelectionPlan& plan);
// The cost of the centroid tree. The tree serves budgets below the share that its coarse levels let
// through; above it the finest level serves alone. So plan.levels, which was asked for, may become
// 1.
ReadingCost tree_cost(const SelectorInputs& inputs, const SelectionRequest& request,
                      SelectionPlan& plan);

// asked_keep and asked_budget of the plan, from whichever of keep and budget is given, and whether
// that pays: the plan becomes dense where reading everything costs no more, or where a short
// context cannot meet the budget. kInvalidArgument where a longer one cannot; the message, which
// `path` opens, has the least that can be met.
Status settle(const ReadingCost& cost, const SelectionRequest& request, const std::string& path,
              SelectionPlan& plan);

// ---- Plans.

inline Status invalid(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}
// Exactly one of budget, keep and thresholds, in range. kInvalidArgument otherwise.
Status check_amount(const SelectionRequest& request);
SelectionPlan dense_plan(SelectionPlan plan, bool fallback);
// Null if every layer is dense; sparse layers have the same shape.
const LayerView* first_sparse(std::span<const LayerView> layers);
// Thresholds as given, for every scope: kInvalidArgument if one is outside [0, 1].
Status fill_explicit(const double* thresholds, SelectionPlan& plan);

// ---- Calibrated numbers.

// The value of a calibrated table at `keep`: linear between grid points, and the neighbour's where
// one of the two stands for "beyond every score".
float calibrated_threshold(const float* grid, double keep);

// log_thresholds and, by the rule kBudget, head_keep of the plan at asked_keep.
void fill_calibrated(const IndexMetadata& metadata, const Calibration& calibration, RuleKind rule,
                     SelectionPlan& plan);

}  // namespace sqz
