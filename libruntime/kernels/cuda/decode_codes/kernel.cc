#include "libruntime/kernels/cuda/decode_codes/kernel.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
Status launch_codes(const CodedParams& params, int team, cudaStream_t stream);
template <int kDim>
int codes_teams_at_once(const CodedParams& params, int team);

Result<TeamSizes> coded_team_sizes(const CodedParams& params) {
  TeamSizes out;
  for (int team = 2; team <= kMostTeam; ++team) {
    out.teams[team] = for_dim(params.lookup.dim, 0, [&](auto dim) {
      return codes_teams_at_once<dim.value>(params, team);
    });
  }
  return out;
}

Status decode_codes(const CodedParams& params, int team, cudaStream_t stream) {
  return for_dim(params.lookup.dim, no_such_dim(params.lookup.dim),
                 [&](auto dim) { return launch_codes<dim.value>(params, team, stream); });
}

}  // namespace sqz::cuda
