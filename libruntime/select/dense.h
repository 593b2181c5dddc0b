// The selector `dense`: every key. Sessions have one beside their own selector, for the layers that
// are read whole.
#pragma once

#include <memory>

#include "libruntime/select/selector.h"

namespace sqz {

std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index);

}  // namespace sqz
