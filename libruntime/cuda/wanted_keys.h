// What rules that count want of every KV head: of the rule `budget` keys, round(share * M), of the
// selector quest pages.
#pragma once

#include "libruntime/select/plan.h"
#include "libruntime/session/served_index.h"

namespace sqz::cuda {

inline constexpr int kScopes = Calibration::kScopes;

// Of the first `scopes` scopes, to wanted [scopes, layers, Hkv] on the device; zeros where nothing
// is counted.
Status upload_wanted_keys(const SelectionPlan& plan, const ServedIndex& index, int scopes,
                          uint32_t* wanted);

}  // namespace sqz::cuda
