// Selectors that score groups of keys: clusters, pages or buckets. A scorer says which groups a
// layer has and what each is worth to a query, a rule (select/rule.h) says which of them are read.
// A new selector is one scorer and one row of the table in select/registry.cc.
#pragma once

#include <memory>
#include <vector>

#include "libruntime/select/rule.h"
#include "libruntime/select/selector.h"

namespace sqz {

// One level of a layer's groups, which cut the groups of the next level, or the slots, into runs.
struct GroupLevel {
  int64_t count = 0;
  const uint32_t* offsets = nullptr;  // [Hkv, count + 1]: first child of each; null: all groups
  int64_t width = 1;                  // have this many slots, but for the last one
  const uint32_t* sizes = nullptr;    // [Hkv, count]: keys below each; null: 1
};

// The shape of a score_clusters() over `clusters` centroids or keys of a layer.
inline ScoreProblem score_problem(const SelectableIndex& index, const LayerView& view,
                                  int64_t clusters) {
  ScoreProblem problem;
  problem.dtype = view.dtype;
  problem.dim = view.head_dim;
  problem.clusters = clusters;
  problem.group = index.group;
  problem.scale = index.scale;
  problem.kernels = index.kernels;
  return problem;
}
// All of it but the centroids.
inline ScoreProblem score_problem(const SelectableIndex& index, const SelectQuery& query,
                                  const Candidates& candidates) {
  ScoreProblem problem =
      score_problem(index, index.layers[query.layer], std::ssize(candidates.sizes));
  problem.ranges = candidates.ranges;
  problem.sizes = candidates.sizes.data();
  problem.queries = query.queries;
  problem.tokens = query.tokens;
  problem.token_stride = query.token_stride;
  return problem;
}

class GroupScorer {
 public:
  virtual ~GroupScorer() = default;
  // Coarse to fine; none in a layer that is read whole.
  virtual std::vector<GroupLevel> levels(const LayerView& view, const LayerTable& table) const = 0;
  // Adds the workspace that score() needs.
  virtual void reserve(const LayerView& view, int level, SelectorLimits& limits) const = 0;
  // scores[i] of the i-th candidate of a level; -infinity for an empty group. Allocation-free.
  // kNumeric for a score that is NaN or +infinity.
  virtual Status score(const SelectQuery& query, int level, const Candidates& candidates,
                       SelectWorkspace& workspace, std::span<float> scores) const = 0;
  // Vectors of [d] of the index that are read to score a group.
  virtual int64_t vectors() const = 0;
  // Whether score() gets queries from before RoPE.
  virtual bool before_rope() const { return false; }
};

using MakeScorer = std::unique_ptr<GroupScorer>(const SelectableIndex&, const SelectionPlan&);
// Clusters by equations 1 to 3 of Squeezed Attention, in the plan's levels of the tree.
MakeScorer make_centroid_scorer;
// Pages by an upper bound of the logits of their keys (Quest, section 3.3).
MakeScorer make_bounds_scorer;
// Buckets by the query classifier (SAAP, section 4).
MakeScorer make_network_scorer;

std::unique_ptr<Selector> make_group_selector(const SelectableIndex& index,
                                              const SelectionPlan& plan,
                                              std::unique_ptr<GroupScorer> scorer);

}  // namespace sqz
