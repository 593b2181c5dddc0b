#include "libruntime/select/registry.h"

#include <algorithm>
#include <cmath>

#include "libruntime/select/group_selector.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/static_selection.h"

namespace sqz {
namespace {

struct SelectorType {
  const char* name;
  int dense_layers = 0;    // first layers that are read whole unless the request says otherwise
  bool tree = false;       // takes levels, rules and thresholds
  bool even = false;       // every head keeps the same share of its keys
  bool sinks = true;       // reads the sinks
  Partition partition{};   // that it needs, if
  const char* needs = "";  // says so
  // Whether the index has what else the selector reads.
  Status (*check)(const SelectorInputs&, const SelectionRequest&) = nullptr;
  // Null: it costs what it keeps.
  ReadingCost (*cost)(const SelectorInputs&, const SelectionRequest&, SelectionPlan&) = nullptr;
  // How it scores groups, or else which keys it lists whatever is asked.
  MakeScorer* scorer = nullptr;
  ListKeys* list = nullptr;
};

Status lacks(const SelectorInputs& inputs, const char* what, const char* found,
             const std::string& expected) {
  return {Code::kUnsupported, bad_field(inputs.path, what, found, expected)};
}

// In the order of SelectorKind.
constexpr SelectorType kSelectors[] = {
    {.name = "auto"},
    {.name = "squeezed",
     .tree = true,
     .partition = Partition::kKmeans,
     .needs = "kmeans: selector squeezed needs an index with clusters",
     .cost = tree_cost,
     .scorer = make_centroid_scorer},
    {.name = "dense"},
    {.name = "quest",
     .dense_layers = 2,  // section 3.4: attention of the first two layers is not sparse
     .partition = Partition::kPages,
     .needs = "pages: selector quest needs an index built with --partition pages",
     .cost = pages_cost,
     .scorer = make_bounds_scorer},
    {.name = "stream", .list = list_recent},
    {.name = "window", .sinks = false, .list = list_recent},
    {.name = "h2o", .check = check_heavy, .list = list_heavy},
    {.name = "saap",
     .even = true,
     .partition = Partition::kBuckets,
     .needs = "buckets: selector saap needs an index built with --qmodel",
     .scorer = make_network_scorer}};
static_assert(std::size(kSelectors) == kSelectorKinds);

const SelectorType& type_of(SelectorKind selector) {
  return kSelectors[static_cast<int>(selector)];
}

// First exact keys that the selector does not read.
int64_t exact_skipped(const SelectorType& type, const IndexMetadata& metadata) {
  return type.sinks ? 0 : metadata.sink;
}

// One threshold for all layers and heads.
bool has_one_threshold(const SelectorType& type, const SelectionRequest& r) {
  return r.thresholds != nullptr || (type.tree && r.rule == RuleKind::kThreshold);
}

// Options that the selector does not take.
Status check_options(const SelectorType& type, const SelectionRequest& r, int levels) {
  const auto refuse = [&](const char* option, const std::string& found, const char* expected) {
    return invalid(
        concat("selector ", type.name, ": ", option, ": found ", found, ", expected ", expected));
  };
  if (has_one_threshold(type, r) && !r.layer_scales.empty()) {
    return invalid(
        "layer_scales: found some, expected none with a threshold for all layers; take "
        "the rule budget");
  }
  if (type.tree) {
    if (r.levels >= 0 && r.levels <= levels) return {};
    return invalid(
        concat("levels: found ", r.levels, ", expected 0 to ", levels, ", what the index has"));
  }
  if (r.levels != 0) return refuse("levels", concat(r.levels), "0: it has no centroids");
  if (r.thresholds != nullptr) {
    return refuse("thresholds", "some", "a budget or keep");
  }
  return {};
}

Result<PreparedSelector> prepare_dense(const SelectionRequest& request) {
  if (request.budget != 0 || request.keep != 0 || request.thresholds != nullptr) {
    return Status(Code::kInvalidArgument,
                  "selector dense reads everything: found a budget, keep or thresholds, "
                  "expected none");
  }
  return PreparedSelector{dense_plan({}, false), nullptr};
}

// All that is left of a pruned index, if that is what is asked for.
Result<PreparedSelector> prepare_pruned(const SelectorInputs& inputs, const SelectorType& type,
                                        const SelectionRequest& request) {
  const PrunedPolicy& pruned = *inputs.metadata.pruned;
  if (pruned.selector != type.name) {
    return lacks(inputs, "partition", "pruned",
                 concat("an index with all its keys: this one was pruned for selector ",
                        pruned.selector, " and serves that alone"));
  }
  SQZ_RETURN_IF_ERROR(check_options(type, request, 0));
  const auto refuse = [&](const char* option, double found, const auto&... expected) {
    return invalid(concat(inputs.path, ": ", option, ": found ", found, ", expected ", expected...,
                          ", what the index was pruned for"));
  };
  const auto differs = [](double asked, double kept) {
    return asked != 0 && std::abs(asked - kept) > 1e-9;
  };
  if (differs(request.budget, pruned.budget)) {
    return refuse("budget", request.budget, pruned.budget, " or none");
  }
  if (differs(request.keep, pruned.keep)) {
    return refuse("keep", request.keep, pruned.keep, " or none");
  }
  if (!request.layer_scales.empty()) {
    return invalid(concat(inputs.path, ": layer_scales: found ", request.layer_scales.size(),
                          ", expected none: each layer was left the keys of its own budget when "
                          "the index was pruned"));
  }
  if (request.dense_layers > 0) return refuse("dense_layers", request.dense_layers, "0");
  PreparedSelector out;
  out.plan.asked_budget = out.plan.least_budget = pruned.budget;
  out.plan.asked_keep = pruned.keep;
  for (const LayerView& view : inputs.index.layers) {
    out.plan.layer_keep.push_back(view.slots > 0 ? 1 : 0);
  }
  out.selector = make_dense_selector(inputs.index, exact_skipped(type, inputs.metadata));
  return out;
}

}  // namespace

const char* selector_name(SelectorKind selector) {
  return type_of(selector).name;
}

SelectorKind fitting_selector(const IndexMetadata& metadata) {
  if (metadata.pruned) {
    const auto* own = std::find_if(
        std::begin(kSelectors), std::end(kSelectors),
        [&](const SelectorType& type) { return metadata.pruned->selector == type.name; });
    if (own != std::end(kSelectors)) return static_cast<SelectorKind>(own - kSelectors);
  }
  return metadata.partition == Partition::kPages     ? SelectorKind::kQuest
         : metadata.partition == Partition::kBuckets ? SelectorKind::kSaap
                                                     : SelectorKind::kSqueezed;
}

Result<PreparedSelector> prepare_selector(const SelectorInputs& inputs,
                                          const SelectionRequest& request) {
  const IndexMetadata& metadata = inputs.metadata;
  const SelectorType& type = type_of(request.selector);
  const auto layers = static_cast<int>(metadata.model.layers);
  if (request.dense_layers < -1 || request.dense_layers > layers) {
    return invalid(
        concat("dense_layers: found ", request.dense_layers, ", expected -1 to ", layers));
  }
  const int dense_layers =
      request.dense_layers == 0 ? type.dense_layers : std::max(request.dense_layers, 0);
  SelectionRequest spread = request;
  spread.uniform_layers |= has_one_threshold(type, request);
  SQZ_ASSIGN_OR_RETURN(std::vector<double> layer_keep,
                       layer_scales(metadata, inputs.index.layers, spread, dense_layers));
  if (metadata.pruned) return prepare_pruned(inputs, type, request);
  if (request.selector == SelectorKind::kDense) return prepare_dense(request);
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_options(type, request, metadata.levels));
  if (first_sparse(inputs.index.layers) == nullptr) {
    PreparedSelector whole;
    // One of the two is given, or thresholds.
    whole.plan.asked_budget = whole.plan.asked_keep = request.budget + request.keep;
    whole.plan = dense_plan(whole.plan, true);
    return whole;
  }
  if (*type.needs != 0 && metadata.partition != type.partition) {
    return lacks(inputs, "partition", partition_name(metadata.partition), type.needs);
  }
  if (type.check != nullptr) SQZ_RETURN_IF_ERROR(type.check(inputs, request));

  PreparedSelector out;
  SelectionPlan& plan = out.plan;
  plan.levels = request.levels == 0 && type.tree ? metadata.levels : request.levels;
  if (request.thresholds != nullptr) {
    SQZ_RETURN_IF_ERROR(fill_explicit(request.thresholds, plan));
  } else {
    const ReadingCost cost = type.cost != nullptr
                                 ? type.cost(inputs, request, plan)
                                 : keys_cost(inputs.index.layers, exact_skipped(type, metadata));
    SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, plan));
    if (plan.dense) return out;
  }
  plan.layer_keep = std::move(layer_keep);
  if (type.even) {
    const std::vector<float> alike(static_cast<size_t>(layers * metadata.model.kv_heads),
                                   static_cast<float>(plan.asked_keep));
    plan.head_keep.assign(Calibration::kScopes, alike);
  }
  if (type.tree && request.thresholds == nullptr) {
    fill_calibrated(metadata, inputs.calibration, request.rule, plan);
  }
  spread_head_keep(metadata, plan);
  if (type.partition == Partition::kPages) {
    const LayerView& sparse = *first_sparse(inputs.index.layers);
    plan.layer_pages = layer_keys(plan, sparse.slots);
    for (int64_t& count : plan.layer_pages) count /= sparse.page_size;
  }
  out.selector = type.scorer == nullptr
                     ? make_static_selector(inputs, plan, exact_skipped(type, metadata), type.list)
                     : make_group_selector(inputs.index, plan, type.scorer(inputs.index, plan));
  return out;
}

}  // namespace sqz
