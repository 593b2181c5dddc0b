#include "libruntime/kernels/cuda/decode/lookup/kernel.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, cudaStream_t stream);
template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team);
namespace {

int teams_at_once(const LookupParams& params, int team) {
  return for_dim(params.dim, 0,
                 [&](auto dim) { return lookup_teams_at_once<dim.value>(params, team); });
}

}  // namespace

Result<TeamSizes> team_sizes(const LookupParams& params) {
  SQZ_RETURN_IF_ERROR(check_group(params.group));
  TeamSizes out;
  for (int team = 2; team <= kMostTeam; ++team) {
    out.teams[team] = teams_at_once(params, team);
  }
  return out;
}

Status decode_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check_group(params.group));
  return for_dim(params.dim, no_such_dim(params.dim),
                 [&](auto dim) { return launch_lookup<dim.value>(params, team, stream); });
}

}  // namespace sqz::cuda
