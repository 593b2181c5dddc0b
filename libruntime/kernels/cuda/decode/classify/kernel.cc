#include "libruntime/kernels/cuda/decode/classify/kernel.h"

#include <algorithm>
#include <array>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/decode/classify/layout.h"

namespace sqz::cuda {

template <int kDim>
int64_t classify_bytes(const ClassifyLayout& layout);
template <int kDim>
int clusters_at_once(int cluster, const ClassifyLayout& layout, const Device& device);
template <int kDim>
Status launch_classify(const ClassifyParams& params, ClassifyTeam team,
                       const ClassifyLayout& layout, cudaStream_t stream);

namespace {

Status check(const ClassifyParams& params) {
  const LookupParams& lookup = params.lookup;
  SQZ_RETURN_IF_ERROR(check_group(lookup.group));
  return for_dim(lookup.dim, no_such_dim(lookup.dim), [](auto) { return Status(); });
}

int64_t bytes_of(const ClassifyParams& params, const ClassifyLayout& layout) {
  return for_dim(params.lookup.dim, int64_t{0},
                 [&](auto dim) { return classify_bytes<dim.value>(layout); });
}

ClassifyLayout layout_of(const ClassifyParams& params, ClassifyTeam team, int ring) {
  const LookupParams& lookup = params.lookup;
  return ClassifyLayout(params.network.hidden, lookup.level[0].clusters, lookup.group, team.cluster,
                        team.blocks(), ring);
}

// With the ring that there is room for.
ClassifyLayout layout_of(const ClassifyParams& params, const ClassifyPlan& plan,
                         ClassifyTeam team) {
  const ClassifyLayout layout = layout_of(params, team, kLongRing);
  return bytes_of(params, layout) <= plan.room ? layout : layout_of(params, team, kShortRing);
}

// Weights that a block reads, in tiles.
int64_t weights_of(const ClassifyParams& params, ClassifyTeam team) {
  const ClassifyLayout layout = layout_of(params, team, kShortRing);
  return int64_t{layout.own_unit_tiles} * weight_columns(params.lookup.dim) +
         int64_t{layout.own_bucket_tiles} * layout.hidden_columns;
}

// [n] clusters of n blocks that the GPU holds at once, with as many blocks as a pair may have.
using ClustersAtOnce = std::array<int, kMostTeam + 1>;

ClustersAtOnce find_clusters(const ClassifyParams& params, const ClassifyPlan& plan) {
  ClustersAtOnce out = {};
  for (int cluster = 2; cluster <= kMostTeam; ++cluster) {
    const ClassifyLayout layout = layout_of(params, plan, {cluster, kMostTeam / cluster});
    if (bytes_of(params, layout) > plan.room) continue;
    out[static_cast<size_t>(cluster)] = for_dim(params.lookup.dim, 0, [&](auto dim) {
      return clusters_at_once<dim.value>(cluster, layout, params.lookup.device);
    });
  }
  return out;
}

// Some clusters more than needed have room: multiprocessors come free one by one.
ClassifyTeam best_team(const ClassifyParams& params, const ClassifyPlan& plan,
                       const ClustersAtOnce& at_once, int pairs) {
  ClassifyTeam best;
  for (int cluster = kMostTeam; cluster > 1; --cluster) {
    const int room = at_once[static_cast<size_t>(cluster)] * 4 / 5;
    const int most = std::min(kMostTeam / cluster, room / pairs);
    for (int clusters = 1; clusters <= most; ++clusters) {
      const ClassifyTeam team = {cluster, clusters};
      const bool fits = bytes_of(params, layout_of(params, plan, team)) <= plan.room;
      if (fits && weights_of(params, team) < weights_of(params, best)) best = team;
    }
  }
  return best;
}

}  // namespace

Result<ClassifyPlan> plan_classify(const ClassifyParams& params) {
  SQZ_RETURN_IF_ERROR(check(params));
  ClassifyPlan plan;
  plan.room = params.lookup.device.block_shared;
  plan.fits = params.lookup.device.has_clusters() &&
              bytes_of(params, layout_of(params, {}, kShortRing)) <= plan.room;
  if (!plan.fits) return plan;
  const ClustersAtOnce at_once = find_clusters(params, plan);
  for (int pairs = 1; pairs <= kTeamPairs; ++pairs) {
    plan.teams[pairs] = best_team(params, plan, at_once, pairs);
  }
  const int64_t bytes =
      layout_of(params, {1, kMostTeam}, kShortRing).exchange_bytes(params.lookup.group, kMostTeam);
  plan.scratch = kScratchBegin + kTeamPairs * bytes;
  return plan;
}

Status decode_classify(const ClassifyParams& params, const ClassifyPlan& plan,
                       cudaStream_t stream) {
  SQZ_RETURN_IF_ERROR(check(params));
  const ClassifyTeam team = plan.team_of(params.lookup.requests * params.lookup.kv_heads);
  const ClassifyLayout layout = layout_of(params, plan, team);
  return for_dim(params.lookup.dim, Status(), [&](auto dim) {
    return launch_classify<dim.value>(params, team, layout, stream);
  });
}

}  // namespace sqz::cuda
