// The selector `squeezed`: clusters scored by equations 1 to 3 of Squeezed Attention, level by
// level from coarse to fine; the children of what a level keeps are the next level's clusters. With
// key codes, single keys are one more level: the clusters say how many keys are read, and let a
// share of all keys through, of which their codes choose so many.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/descend.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

struct SqueezedOptions {
  int levels = 1;    // in use, the finest ones of the index
  double alive = 0;  // share of the keys whose codes are read
};

class SqueezedSelector final : public Selector {
 public:
  SqueezedSelector(const SelectableIndex& index, const SqueezedOptions& options,
                   std::unique_ptr<Rule> rule)
      : index_(index), options_(options), rule_(std::move(rule)) {
    int64_t most = 0;
    for (const LayerView& view : index_.layers) {
      if (view.key_codes.bits > 0) most = std::max(most, view.slots);
    }
    ones_.assign(static_cast<size_t>(most), 1u);
  }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      int64_t clusters = 0;
      for (int k = first_level(view); k < view.levels; ++k) {
        limits.choose_among(view.level[k].clusters);
        limits.use_floats(most_score_workspace(problem_of(view, k)));
        clusters += (view.level[k].clusters + 1) / 2;
      }
      if (view.levels == 0 || view.key_codes.bits == 0) continue;
      ScoreProblem keys = problem_of(view, view.levels - 1);
      keys.clusters = view.slots;
      limits.choose_among(view.slots);
      limits.use_floats(most_score_workspace(keys));
      limits.workspace.products.emplace(*index_.kernels, view.head_dim);
      limits.clusters = std::max(limits.clusters, clusters);
      limits.by_code = std::max(limits.by_code, (view.slots + 1) / 2);
      limits.weights = std::max(limits.weights, view.level[view.levels - 1].clusters);
    }
    const size_t most = limits.workspace.scores.size();
    limits.workspace.sizes.resize(2 * most);
    limits.workspace.ranges.resize(2 * most);
    limits.workspace.bytes.resize(most + kLanePad);
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const int first = first_level(view);
    const size_t most = workspace.scores.size();
    const auto half = [&](auto& all, int k) { return std::span(all).subspan(k % 2 * most, most); };
    const ClusterRange all = {0, static_cast<uint32_t>(view.level[first].clusters)};
    AliveClusters alive = {{&all, 1}, {sizes_of(query, first), all.count}};
    out.clear();
    for (int k = first; k < view.levels; ++k) {
      const size_t n = alive.sizes.size();
      const std::span<float> scores = std::span(workspace.scores).first(n);
      const std::span<uint8_t> chosen = std::span(workspace.bytes).first(n);
      SQZ_RETURN_IF_ERROR(
          score_clusters(problem_of(query, k, alive), scores, std::span(workspace.floats)));
      const bool finest = k + 1 == view.levels;
      const bool by_codes = view.key_codes.bits > 0;
      const Choice choice = {.layer = query.layer,
                             .kv_head = query.kv_head,
                             .scope = query.tokens > 1 ? 1 : 0,
                             .level = k - first,
                             .finest = finest,
                             .keys = view.slots,
                             .scores = scores,
                             .sizes = alive.sizes};
      rule_->choose(choice, workspace.order, chosen);
      if (!finest && by_codes) let_through(choice, workspace.order, chosen);
      out.centroids += static_cast<int64_t>(n);
      if (finest && by_codes) return choose_keys(query, choice, alive, workspace, out);
      if (by_codes) add_unread(k, alive, chosen, out);

      const uint32_t* offsets =
          view.level[k].offsets + query.kv_head * (view.level[k].clusters + 1);
      if (finest) {
        for_each_chosen(alive.ranges, chosen, [&](size_t, uint32_t cluster) {
          out.read.append({offsets[cluster], offsets[cluster + 1] - offsets[cluster]});
        });
      } else {
        alive = children_of_chosen(alive.ranges, chosen, offsets, sizes_of(query, k + 1),
                                   half(workspace.ranges, k), half(workspace.sizes, k));
      }
    }
    return {};
  }

 private:
  int64_t alive_keys(const Choice& choice) const {
    return std::llround(options_.alive * static_cast<double>(choice.keys));
  }

  // Coarser levels leave as many keys as codes will be read of.
  void let_through(const Choice& choice, std::span<uint32_t> order,
                   std::span<uint8_t> chosen) const {
    if (chosen_keys(choice, chosen) >= alive_keys(choice)) return;
    choose_best(choice, alive_keys(choice), order, chosen);
  }

  // As many keys as the chosen clusters have, by their codes. `clusters`: the finest level, `alive`
  // and chosen in workspace.bytes.
  Status choose_keys(const SelectQuery& query, const Choice& clusters, const AliveClusters& alive,
                     SelectWorkspace& workspace, HeadSelection& out) const {
    const LayerView& view = index_.layers[query.layer];
    const int finest = view.levels - 1;
    const std::span<uint8_t> chosen = std::span(workspace.bytes).first(alive.sizes.size());
    const int64_t wanted = chosen_keys(clusters, chosen);
    Choice through = clusters;
    through.finest = false;
    choose_best(through, std::max(wanted, alive_keys(clusters)), workspace.order, chosen);
    add_unread(finest, alive, chosen, out);
    out.means = std::count(chosen.begin(), chosen.end(), 1);
    const size_t most = workspace.scores.size();
    const auto half = [&](auto& all) { return std::span(all).subspan(finest % 2 * most, most); };
    const LevelView& level = view.level[finest];
    const AliveClusters keys = children_of_chosen(
        alive.ranges, chosen, level.offsets + query.kv_head * (level.clusters + 1), ones_.data(),
        half(workspace.ranges), half(workspace.sizes));
    out.codes = std::ssize(keys.sizes);

    const CodedHead codes = coded_head(view, view.key_codes, false, query.kv_head);
    ScoreProblem problem = problem_of(query, finest, keys);
    problem.coded = &codes;
    problem.products = &*workspace.products;
    const std::span<float> scores = std::span(workspace.scores).first(keys.sizes.size());
    const std::span<uint8_t> read = std::span(workspace.bytes).first(keys.sizes.size());
    SQZ_RETURN_IF_ERROR(score_clusters(problem, scores, std::span(workspace.floats)));
    Choice single = clusters;
    single.scores = scores;
    single.sizes = keys.sizes;
    choose_best(single, wanted, workspace.order, read);
    append_keys(keys, read, out);
    add_weights(problem, codes, read, workspace.floats, out);
    return {};
  }

  // Adds runs of the keys that are read, and of the keys between them.
  void append_keys(const AliveClusters& keys, std::span<const uint8_t> read,
                   HeadSelection& out) const {
    const uint8_t* at = read.data();
    for (const ClusterRange& range : keys.ranges) {
      const uint8_t* const begin = at;
      const uint8_t* const end = at + range.count;
      const auto slot = [&](const uint8_t* i) {
        return range.first + static_cast<uint32_t>(i - begin);
      };
      while (at < end) {
        const auto* first =
            static_cast<const uint8_t*>(std::memchr(at, 1, static_cast<size_t>(end - at)));
        if (first == nullptr) first = end;
        out.by_code.append({slot(at), slot(first) - slot(at)});
        for (at = first; at < end && *at != 0;) ++at;
        out.read.append({slot(first), slot(at) - slot(first)});
      }
    }
  }

  // Adds the weights of the keys that are not read, cluster by cluster, from the logits of their
  // codes.
  void add_weights(const ScoreProblem& keys, const CodedHead& codes, std::span<const uint8_t> read,
                   std::span<float> floats, HeadSelection& out) const {
    const ScoredRows scored = scored_rows(keys, floats);
    if (scored.rows == 0) return;
    int64_t place = 0, before = 0;
    const auto add = [&](int64_t cluster, int64_t first, int64_t last) {
      ClusterWeight& weight = out.weight_room[static_cast<size_t>(out.weight_count)];
      weight.cluster = static_cast<uint32_t>(cluster);
      float most = -INFINITY;
      for (int64_t r = 0; r < scored.rows; ++r) {
        const float* weights = scored.weights + r * scored.ld + place;
        const float sum = index_.kernels->unread_sum(weights, &read[place], last - first);
        weight.logits[r] = scored.peaks[r] + std::log(sum);
        most = std::max(most, weight.logits[r]);
      }
      if (most > -INFINITY) ++out.weight_count;
      place += last - first;
    };
    for (const ClusterRange& range : keys.ranges) {
      before = codes.for_each_cluster(range.first, range.first + range.count, before, add);
    }
  }

  int first_level(const LayerView& view) const {
    return std::max(0, view.levels - options_.levels);
  }

  // Its shape alone.
  ScoreProblem problem_of(const LayerView& view, int level) const {
    ScoreProblem problem;
    problem.dtype = view.dtype;
    problem.dim = view.head_dim;
    problem.clusters = view.level[level].clusters;
    problem.group = index_.group;
    problem.scale = index_.scale;
    problem.kernels = index_.kernels;
    return problem;
  }

  ScoreProblem problem_of(const SelectQuery& query, int level, const AliveClusters& alive) const {
    const LayerView& view = index_.layers[query.layer];
    ScoreProblem problem = problem_of(view, level);
    problem.centroids = static_cast<const std::byte*>(view.level[level].centroids) +
                        query.kv_head * problem.clusters * view.head_dim * dtype_size(view.dtype);
    problem.clusters = std::ssize(alive.sizes);
    problem.ranges = alive.ranges;
    problem.sizes = alive.sizes.data();
    problem.queries = query.queries;
    problem.tokens = query.tokens;
    problem.token_stride = query.token_stride;
    return problem;
  }

  // Keys of every cluster of a level, dead or alive.
  const uint32_t* sizes_of(const SelectQuery& query, int level) const {
    return index_.tables[query.layer].level[level].sizes.data() +
           query.kv_head * index_.layers[query.layer].level[level].clusters;
  }

  static void add_unread(int level, const AliveClusters& alive, std::span<const uint8_t> chosen,
                         HeadSelection& out) {
    size_t i = 0;
    for (const ClusterRange& range : alive.ranges) {
      const uint32_t end = range.first + range.count;
      for (uint32_t cluster = range.first; cluster < end; ++cluster, ++i) {
        if (chosen[i] != 0 || alive.sizes[i] == 0) continue;
        out.clusters.append({static_cast<uint32_t>(level), cluster, 1});
      }
    }
  }

  SelectableIndex index_;
  SqueezedOptions options_;
  std::unique_ptr<Rule> rule_;
  std::vector<uint32_t> ones_;  // [M], if there are key codes
};

}  // namespace

Result<PreparedSelector> prepare_squeezed(const SelectorInputs& inputs,
                                          const SelectionRequest& request) {
  PreparedSelector out;
  SQZ_ASSIGN_OR_RETURN(out.plan, plan_selection(inputs.metadata, inputs.index.layers,
                                                inputs.calibration, request, inputs.path));
  if (out.plan.dense) return out;
  out.plan.layer_keep = inputs.layer_keep;
  if (request.thresholds == nullptr) {
    std::array<const float*, Calibration::kScopes> curves;
    for (int scope = 0; scope < Calibration::kScopes; ++scope) {
      curves[scope] = threshold_curve(inputs.calibration, scope, out.plan.levels);
    }
    const double most = out.plan.levels > 1 ? inputs.calibration.coarse_keep.back() : 1.0;
    spread_thresholds(inputs.metadata, inputs.calibration.shares, curves, most, out.plan);
    spread_head_keep(inputs.metadata, out.plan);
  }
  const SqueezedOptions options = {.levels = out.plan.levels, .alive = out.plan.alive};
  out.selector = std::make_unique<SqueezedSelector>(
      inputs.index, options, make_planned_rule(out.plan, inputs.metadata.model.kv_heads));
  return out;
}

}  // namespace sqz
