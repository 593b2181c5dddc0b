// How the scores of a block's tokens and a GQA group's heads become one score of a cluster.
#pragma once

#include <cstdint>

namespace sqz {

enum class GroupPolicy : int32_t {
  kMean = 0,  // mean of S over the block's tokens and the group's heads (Squeezed Attention 4.1)
  kMax = 1,   // max over the heads of the mean over the tokens
  kAny = 2,   // max over heads and tokens: a cluster that any query wants
};

inline constexpr GroupPolicy kGroupPolicies[] = {GroupPolicy::kMean, GroupPolicy::kMax,
                                                 GroupPolicy::kAny};

constexpr const char* group_policy_name(GroupPolicy policy) {
  return policy == GroupPolicy::kMean ? "mean" : policy == GroupPolicy::kMax ? "max" : "any";
}

}  // namespace sqz
