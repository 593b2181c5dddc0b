#include "libruntime/kernels/cuda/decode_lookup/kernel.h"

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

template <int kDim>
Status launch_lookup(const LookupParams& params, int team, bool hopper, cudaStream_t stream);
template <int kDim>
int lookup_teams_at_once(const LookupParams& params, int team);

namespace {

Status check(const LookupParams& params) {
  if (params.group >= 1 && params.group <= kMostGroup) return {};
  return {Code::kUnsupported, concat("CUDA: found ", params.group,
                                     " query heads a KV head, expected 1 to ", kMostGroup)};
}

Status no_such_dim(int dim) {
  return {Code::kUnsupported,
          concat("CUDA: found head dimension ", dim, ", expected 64, 96, 128 or 256")};
}

int teams_at_once(const LookupParams& params, int team) {
  switch (params.dim) {
    case 64:
      return lookup_teams_at_once<64>(params, team);
    case 96:
      return lookup_teams_at_once<96>(params, team);
    case 128:
      return lookup_teams_at_once<128>(params, team);
    case 256:
      return lookup_teams_at_once<256>(params, team);
    default:
      return 0;
  }
}

}  // namespace

Result<int> most_team(const LookupParams& params, int device) {
  SQZ_RETURN_IF_ERROR(check(params));
  int major = 0;
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major < 9) return 1;
  // 16 blocks are more than every GPU promises to gather; a team must not wait for another's end.
  for (int team = kMostTeam; team > 1; team /= 2) {
    if (teams_at_once(params, team) >= params.kv_heads) return team;
  }
  return 1;
}

Status decode_lookup(const LookupParams& params, int team, cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check(params));
  const bool hopper = params.hopper;
  switch (params.dim) {
    case 64:
      return launch_lookup<64>(params, team, hopper, stream);
    case 96:
      return launch_lookup<96>(params, team, hopper, stream);
    case 128:
      return launch_lookup<128>(params, team, hopper, stream);
    case 256:
      return launch_lookup<256>(params, team, hopper, stream);
    default:
      return no_such_dim(params.dim);
  }
}

}  // namespace sqz::cuda
