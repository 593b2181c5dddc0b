// The selector `squeezed`: clusters scored by equations 1 to 3 of Squeezed Attention, level by
// level from coarse to fine; the children of what a level keeps are the next level's clusters.
#pragma once

#include <memory>

#include "libruntime/select/rule.h"
#include "libruntime/select/score.h"
#include "libruntime/select/selector.h"

namespace sqz {

struct SqueezedOptions {
  int levels = 1;  // in use, the finest ones of the index
  Group group = Group::kMean;
  bool estimate = false;  // report clusters that are not read, for the residual
};

std::unique_ptr<Selector> make_squeezed_selector(const SelectableIndex& index,
                                                 const SqueezedOptions& options,
                                                 std::unique_ptr<Rule> rule);

}  // namespace sqz
