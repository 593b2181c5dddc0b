#include "libruntime/kernels/cuda/decode_lookup/kernel.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream);
template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team);
template <int kDim>
int lookup_together_at_once(const LookupParams& params, int team, int most);
template <int kDim>
int lookup_together_teams_at_once(const LookupParams& params, int team, int together);
template <int kDim>
Status launch_lookup_together(const LookupParams& params, int team, int together,
                              cudaStream_t stream);

namespace {

Status check(const LookupParams& params) {
  if (params.group >= 1 && params.group <= kMostGroup) return {};
  return {Code::kUnsupported, concat("CUDA: found ", params.group,
                                     " query heads a KV head, expected 1 to ", kMostGroup)};
}

int teams_at_once(const LookupParams& params, int team) {
  return for_dim(params.dim, 0,
                 [&](auto dim) { return lookup_teams_at_once<dim.value>(params, team); });
}

}  // namespace

Result<TeamSizes> team_sizes(const LookupParams& params) {
  SQZ_RETURN_IF_ERROR(check(params));
  TeamSizes out;
  for (int team = 2; team <= kMostTeam; ++team) {
    out.teams[team] = teams_at_once(params, team);
  }
  return out;
}

Status decode_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check(params));
  return for_dim(params.dim, no_such_dim(params.dim),
                 [&](auto dim) { return launch_lookup<dim.value>(params, team, stream); });
}

Result<TogetherPlan> plan_together(const LookupParams& params, int most) {
  SQZ_RETURN_IF_ERROR(check(params));
  if (params.pages || params.rule != LookupRule::kThreshold || params.width == 0) {
    return TogetherPlan{};
  }
  TogetherPlan plan;
  plan.clusters = params.device.has_clusters();
  for (int team = 1; team <= kMostTeam; ++team) {
    const int fitting = for_dim(params.dim, 0, [&](auto dim) {
      return lookup_together_at_once<dim.value>(params, team, most);
    });
    if (fitting == 0) continue;
    const int teams = for_dim(params.dim, 0, [&](auto dim) {
      return lookup_together_teams_at_once<dim.value>(params, team, fitting);
    });
    plan.fitting[team] = fitting;
    plan.teams[team] = teams;
    // A team must not wait for another's end, at least where there is one for each KV head.
    if (team == 1 || teams >= params.kv_heads) plan.requests = std::max(plan.requests, fitting);
  }
  return plan;
}

Status decode_lookup_together(const LookupParams& params, const TogetherPlan& plan,
                              cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check(params));
  const int together = plan.of(params.requests);
  const int count = (params.requests + together - 1) / together * params.kv_heads;
  const int team = plan.team(count, together);
  return for_dim(params.dim, no_such_dim(params.dim), [&](auto dim) {
    return launch_lookup_together<dim.value>(params, team, together, stream);
  });
}

}  // namespace sqz::cuda
