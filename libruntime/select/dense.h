// The selector `dense`: every key.
#pragma once

#include <memory>

#include "libruntime/select/selector.h"

namespace sqz {

std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index);

}  // namespace sqz
