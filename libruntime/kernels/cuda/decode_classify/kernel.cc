#include "libruntime/kernels/cuda/decode_classify/kernel.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"

namespace sqz::cuda {

template <int kDim>
int classify_teams_at_once(const ClassifyParams& params, int team, int ring);
template <int kDim>
int64_t classify_bytes(const ClassifyParams& params, int team, int ring);
template <int kDim>
Status launch_classify(const ClassifyParams& params, int team, int ring, cudaStream_t stream);

namespace {

Status check(const ClassifyParams& params) {
  const LookupParams& lookup = params.lookup;
  if (lookup.group < 1 || lookup.group > kMostGroup) {
    return {Code::kUnsupported, concat("CUDA: found ", lookup.group,
                                       " query heads a KV head, expected 1 to ", kMostGroup)};
  }
  return for_dim(lookup.dim, no_such_dim(lookup.dim), [](auto) { return Status(); });
}

int64_t bytes_of(const ClassifyParams& params, int team, int ring) {
  return for_dim(params.lookup.dim, int64_t{0},
                 [&](auto dim) { return classify_bytes<dim.value>(params, team, ring); });
}

int ring_of(const ClassifyParams& params, const ClassifyPlan& plan, int team) {
  return bytes_of(params, team, kLongRing) <= plan.room ? kLongRing : kShortRing;
}

}  // namespace

Result<ClassifyPlan> plan_classify(const ClassifyParams& params, int device) {
  SQZ_RETURN_IF_ERROR(check(params));
  int major = 0, room = 0;
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  ClassifyPlan plan = {1, room};
  // A team of one must have room, too: it serves calls of many requests.
  const int64_t least = bytes_of(params, 1, kShortRing);
  if (least > room) {
    return Status(Code::kUnsupported,
                  concat("device_type 2 (CUDA): found a query classifier of ",
                         params.lookup.level[0].clusters, " buckets and ", params.hidden,
                         " hidden units, which needs ", least,
                         " bytes of a block's shared memory; expected at most ", room));
  }
  if (major < 9) return plan;
  // 16 blocks are more than every GPU promises to gather; a team must not wait for another's end.
  for (int team = kMostTeam; team > 1; team /= 2) {
    const int teams = for_dim(params.lookup.dim, 0, [&](auto dim) {
      return classify_teams_at_once<dim.value>(params, team, ring_of(params, plan, team));
    });
    if (teams < params.lookup.kv_heads) continue;
    plan.most_team = team;
    break;
  }
  return plan;
}

Status decode_classify(const ClassifyParams& params, const ClassifyPlan& plan, int team,
                       cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check(params));
  return for_dim(params.lookup.dim, Status(), [&](auto dim) {
    return launch_classify<dim.value>(params, team, ring_of(params, plan, team), stream);
  });
}

}  // namespace sqz::cuda
