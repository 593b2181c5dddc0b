// Rules that count want so much of every KV head: the rule `budget` round(share * M) keys, the
// selector quest pages.
#pragma once

#include "libruntime/select/plan.h"
#include "libruntime/session/served_index.h"

namespace sqz::cuda {

inline constexpr int kScopes = Calibration::kScopes;

// Writes wanted [scopes, layers, Hkv] on the device for the first `scopes` scopes; zeros where
// nothing is counted.
Status upload_wanted_keys(const SelectionPlan& plan, const ServedIndex& index, int scopes,
                          uint32_t* wanted);

}  // namespace sqz::cuda
