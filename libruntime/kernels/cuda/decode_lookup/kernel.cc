#include "libruntime/kernels/cuda/decode_lookup/kernel.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream);
template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team);
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

}  // namespace sqz::cuda
