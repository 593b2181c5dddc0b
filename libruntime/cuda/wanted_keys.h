// What rules that count want of every KV head: of the rule `budget` keys, round(share * M), of the
// selector quest pages.
#pragma once

#include <vector>

#include "libruntime/select/plan.h"
#include "libruntime/session/served_index.h"

namespace sqz::cuda {

inline constexpr int kScopes = Calibration::kScopes;

// [layers, Hkv]; zeros where nothing is counted.
std::vector<uint32_t> wanted_keys(const SelectionPlan& plan, int scope, const ServedIndex& index);

// Those of all scopes, to wanted [kScopes, layers, Hkv] on the device.
Status upload_wanted_keys(const SelectionPlan& plan, const ServedIndex& index, uint32_t* wanted);

}  // namespace sqz::cuda
