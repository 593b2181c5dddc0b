#include "libruntime/kernels/cuda/decode_lookup/kernel.h"

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
  for (int team = 2; team <= kMostTeam && params.hopper; ++team) {
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
  for (int team = params.hopper ? kMostTeam : 1; team >= 1; team /= 2) {
    TogetherPlan plan = {team, 0};
    plan.requests = for_dim(params.dim, 0, [&](auto dim) {
      return lookup_together_at_once<dim.value>(params, team, most);
    });
    if (plan.requests == 0) break;
    if (team == 1) return plan;
    const int teams = for_dim(params.dim, 0, [&](auto dim) {
      return lookup_together_teams_at_once<dim.value>(params, team, plan.requests);
    });
    // A team must not wait for another's end.
    if (teams >= params.kv_heads) return plan;
  }
  return TogetherPlan{};
}

int together_requests(const TogetherPlan& plan, int requests) {
  const int teams = (requests + plan.requests - 1) / plan.requests;
  return (requests + teams - 1) / teams;
}

Status decode_lookup_together(const LookupParams& params, const TogetherPlan& plan,
                              cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check(params));
  return for_dim(params.dim, no_such_dim(params.dim), [&](auto dim) {
    return launch_lookup_together<dim.value>(params, plan.team,
                                             together_requests(plan, params.requests), stream);
  });
}

}  // namespace sqz::cuda
