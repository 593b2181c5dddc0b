// The list of selectors. A new one is its own file, or a part of that of its kind, which has a
// function like those below, and one line of the list in registry.cc, in the place of its value in
// sqz_selector.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "libruntime/select/plan.h"
#include "libruntime/select/selector.h"

namespace sqz {

// What a selector is made from. Borrowed: all of it outlives the selector but the path.
struct SelectorInputs {
  const IndexMetadata& metadata;
  const Calibration& calibration;
  SelectableIndex index;
  std::string path;  // opens messages
  std::vector<double> layer_keep =
      {};  // [layers] as SelectionPlan::layer_keep; set by prepare_selector()
};

// `selector` is null if the plan is to read everything.
struct PreparedSelector {
  SelectionPlan plan;
  std::unique_ptr<Selector> selector;
};

// kInvalidArgument for a request that makes no sense or a budget that cannot be met, kUnsupported
// for an index that lacks what the selector needs.
using PrepareSelector = Result<PreparedSelector>(const SelectorInputs&, const SelectionRequest&);

struct SelectorType {
  const char* name;  // as tools and sqz_selector_name() spell it
  PrepareSelector* prepare;
  int dense_layers;  // first layers that are read whole unless the request says otherwise
};

// In the order of SelectorKind.
std::span<const SelectorType> selector_types();

// The selector that an index was built for; see SQZ_SELECTOR_AUTO.
SelectorKind fitting_selector(const IndexMetadata& metadata);

// The type's prepare(), and which layers are read whole. kInvalidArgument, too, for a number of
// dense layers that the model does not have.
Result<PreparedSelector> prepare_selector(const SelectorInputs& inputs,
                                          const SelectionRequest& request);

PrepareSelector prepare_squeezed, prepare_dense, prepare_quest, prepare_ideal, prepare_stream,
    prepare_window, prepare_h2o, prepare_saap;

}  // namespace sqz
