// Keys that the rule `budget` wants: round(share * M) of every KV head.
#pragma once

#include <vector>

#include "libruntime/select/plan.h"
#include "libruntime/session/served_index.h"

namespace sqz::cuda {

inline constexpr int kScopes = Calibration::kScopes;

// [layers, Hkv]; plan.shares is not empty.
std::vector<uint32_t> wanted_keys(const SelectionPlan& plan, int scope, const ServedIndex& index);

// Those of all scopes, to wanted [kScopes, layers, Hkv] on the device. Nothing for a plan without
// shares.
Status upload_wanted_keys(const SelectionPlan& plan, const ServedIndex& index, uint32_t* wanted);

}  // namespace sqz::cuda
