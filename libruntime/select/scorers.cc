// Scorers say how much a group of keys is worth to a query: by centroids (clusters), by bounds
// (pages) and by a network (buckets).
#include <algorithm>
#include <cmath>

#include "libruntime/select/group_selector.h"

namespace sqz {
namespace {

class CentroidScorer final : public GroupScorer {
 public:
  CentroidScorer(const SelectableIndex& index, int levels) : index_(index), levels_(levels) {}

  std::vector<GroupLevel> levels(const LayerView& view, const LayerTable& table) const override {
    std::vector<GroupLevel> out;
    for (int k = first_level(view); k < view.levels; ++k) {
      out.push_back({.count = view.level[k].clusters,
                     .offsets = view.level[k].offsets,
                     .sizes = table.level[k].sizes.data()});
    }
    return out;
  }

  void reserve(const LayerView& view, int level, SelectorLimits& limits) const override {
    const int64_t clusters = view.level[first_level(view) + level].clusters;
    limits.use_floats(most_score_workspace(score_problem(index_, view, clusters)));
  }

  Status score(const SelectQuery& query, int level, const Candidates& candidates,
               SelectWorkspace& workspace, std::span<float> scores) const override {
    const LayerView& view = index_.layers[query.layer];
    const LevelView& from = view.level[first_level(view) + level];
    ScoreProblem problem = score_problem(index_, query, candidates);
    problem.centroids = static_cast<const std::byte*>(from.centroids) +
                        query.kv_head * from.clusters * view.head_dim * dtype_size(view.dtype);
    return score_clusters(problem, scores, workspace.floats);
  }

  int64_t vectors() const override { return 1; }

 private:
  int first_level(const LayerView& view) const { return std::max(0, view.levels - levels_); }

  SelectableIndex index_;
  int levels_;
};

// The bound of a query and a page is the sum over c of max(q_c min_c, q_c max_c), that is
// max(q, 0) . max + min(q, 0) . min. It is linear in the two parts of q: so the mean of the bounds
// of several queries is the bound of their mean parts.
class BoundsScorer final : public GroupScorer {
 public:
  explicit BoundsScorer(const SelectableIndex& index) : index_(index) {}

  std::vector<GroupLevel> levels(const LayerView& view, const LayerTable&) const override {
    if (view.pages == 0) return {};
    return {{.count = view.pages, .width = view.page_size}};
  }

  void reserve(const LayerView& view, int, SelectorLimits& limits) const override {
    limits.use_floats(2 * (view.head_dim + padded_dim(view.head_dim)));
  }

  Status score(const SelectQuery& query, int, const Candidates&, SelectWorkspace& workspace,
               std::span<float> scores) const override {
    const LayerView& view = index_.layers[query.layer];
    const int64_t dim = view.head_dim;
    float* upper = workspace.floats.data();
    float* lower = upper + dim;
    std::fill(upper, lower + dim, 0.0f);
    const float weight = 1.0f / static_cast<float>(query.tokens * index_.group);
    for (int64_t t = 0; t < query.tokens; ++t) {
      for (int64_t h = 0; h < index_.group; ++h) {
        const float* q = query.queries + t * query.token_stride + h * dim;
        for (int64_t c = 0; c < dim; ++c) {
          upper[c] += weight * std::max(q[c], 0.0f);
          lower[c] += weight * std::min(q[c], 0.0f);
        }
      }
    }
    float* packed_upper = lower + dim;
    float* packed_lower = packed_upper + padded_dim(dim);
    const CpuKernels& kernels = *index_.kernels;
    kernels.pack(view.dtype, upper, dim, 1, dim, packed_upper);
    kernels.pack(view.dtype, lower, dim, 1, dim, packed_lower);
    const int64_t skip = query.kv_head * view.pages * dim * dtype_size(view.dtype);
    kernels.page_bounds(
        view.dtype, packed_upper, packed_lower, static_cast<const std::byte*>(view.page_min) + skip,
        static_cast<const std::byte*>(view.page_max) + skip, view.pages, dim, scores.data());
    const bool finite =
        std::all_of(scores.begin(), scores.end(), [](float score) { return std::isfinite(score); });
    if (finite) return {};
    return {Code::kNumeric, "the product of a query and a page's bounds is NaN or infinite"};
  }

  int64_t vectors() const override { return 2; }

 private:
  SelectableIndex index_;
};

// The network says from a query before RoPE how much attention a key of each bucket gets
// (formats/qmodel_file.h): equation 1 with its logits in the place of products with centroids. The
// network is part of the model, so that it does not count in the budget.
class NetworkScorer final : public GroupScorer {
 public:
  explicit NetworkScorer(const SelectableIndex& index) : index_(index) {}

  std::vector<GroupLevel> levels(const LayerView& view, const LayerTable& table) const override {
    if (view.buckets == 0) return {};
    return {{.count = view.buckets,
             .offsets = view.bucket_offsets,
             .sizes = table.bucket_sizes.data()}};
  }

  void reserve(const LayerView& view, int, SelectorLimits& limits) const override {
    ScoreProblem problem = score_problem(index_, view, view.buckets);
    problem.network = &view.classifier;
    limits.use_floats(score_workspace(problem));
  }

  Status score(const SelectQuery& query, int, const Candidates& buckets, SelectWorkspace& workspace,
               std::span<float> scores) const override {
    const LayerView& view = index_.layers[query.layer];
    ClassifierView head = view.classifier;
    head.hidden_weight += query.kv_head * head.hidden * view.head_dim;
    head.hidden_bias += query.kv_head * head.hidden;
    head.output_weight += query.kv_head * view.buckets * head.hidden;
    head.output_bias += query.kv_head * view.buckets;
    ScoreProblem problem = score_problem(index_, query, buckets);
    problem.network = &head;
    problem.scale = 1;
    return score_clusters(problem, scores, workspace.floats);
  }

  int64_t vectors() const override { return 0; }
  bool before_rope() const override { return true; }

 private:
  SelectableIndex index_;
};

}  // namespace

std::unique_ptr<GroupScorer> make_centroid_scorer(const SelectableIndex& index,
                                                  const SelectionPlan& plan) {
  return std::make_unique<CentroidScorer>(index, plan.levels);
}
std::unique_ptr<GroupScorer> make_bounds_scorer(const SelectableIndex& index,
                                                const SelectionPlan&) {
  return std::make_unique<BoundsScorer>(index);
}
std::unique_ptr<GroupScorer> make_network_scorer(const SelectableIndex& index,
                                                 const SelectionPlan&) {
  return std::make_unique<NetworkScorer>(index);
}

}  // namespace sqz
