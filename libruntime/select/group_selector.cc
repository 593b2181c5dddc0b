#include "libruntime/select/group_selector.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sqz {
namespace {

class GroupSelector final : public Selector {
 public:
  GroupSelector(const SelectableIndex& index, const SelectionPlan& plan,
                std::unique_ptr<GroupScorer> scorer, bool tree)
      : index_(index), plan_(plan), scorer_(std::move(scorer)), tree_(tree) {
    int64_t most = 0;
    for (size_t l = 0; l < index_.layers.size(); ++l) {
      groups_.push_back(scorer_->levels(index_.layers[l], index_.tables[l]));
      for (const GroupLevel& level : groups_.back()) {
        if (level.sizes == nullptr) most = std::max(most, level.count);
      }
      if (by_codes(index_.layers[l])) most = std::max(most, index_.layers[l].slots);
    }
    ones_.assign(static_cast<size_t>(most), 1u);
  }

  bool before_rope() const override { return scorer_->before_rope(); }

  SelectorLimits limits() const override {
    SelectorLimits limits;
    bool descends = false;
    for (size_t l = 0; l < groups_.size(); ++l) {
      const LayerView& view = index_.layers[l];
      const auto levels = static_cast<int>(groups_[l].size());
      int64_t clusters = 0;
      for (int k = 0; k < levels; ++k) {
        limits.choose_among(groups_[l][k].count);
        scorer_->reserve(view, k, limits);
        clusters += (groups_[l][k].count + 1) / 2;
      }
      descends |= levels > 1 || by_codes(view);
      if (!by_codes(view)) continue;
      limits.clusters = std::max(limits.clusters, clusters);
      limits.choose_among(view.slots);
      limits.use_floats(most_score_workspace(score_problem(index_, view, view.slots)));
      limits.workspace.products.emplace(*index_.kernels, view.head_dim);
      limits.by_code = std::max(limits.by_code, (view.slots + 1) / 2);
      limits.weights = std::max(limits.weights, groups_[l].back().count);
    }
    const size_t most = limits.workspace.scores.size();
    if (descends) {
      limits.workspace.sizes.resize(2 * most);
      limits.workspace.ranges.resize(2 * most);
    }
    limits.workspace.bytes.resize(most + kLanePad);
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const std::vector<GroupLevel>& levels = groups_[query.layer];
    const size_t most = workspace.scores.size();
    const auto half = [&](auto& all, int k) { return std::span(all).subspan(k % 2 * most, most); };
    out.clear();
    const ClusterRange whole = {0, static_cast<uint32_t>(levels[0].count)};
    Candidates candidates = {{&whole, 1}, {sizes_of(query, 0), whole.count}};
    for (int k = 0;; ++k) {
      const size_t n = candidates.sizes.size();
      const std::span<float> scores = std::span(workspace.scores).first(n);
      const std::span<uint8_t> chosen = std::span(workspace.bytes).first(n);
      SQZ_RETURN_IF_ERROR(scorer_->score(query, k, candidates, workspace, scores));
      const bool finest = k + 1 == std::ssize(levels);
      const Choice choice = {.layer = query.layer,
                             .kv_head = query.kv_head,
                             .scope = query.tokens > 1 ? 1 : 0,
                             .level = k,
                             .finest = finest,
                             .keys = view.slots,
                             .scores = scores,
                             .sizes = candidates.sizes};
      choose(plan_, choice, workspace.order, chosen);
      out.centroids += scorer_->vectors() * static_cast<int64_t>(n);
      if (by_codes(view)) {
        if (finest) return choose_keys(query, choice, candidates, workspace, out);
        let_through(choice, workspace.order, chosen);
        add_unread(level_of(view, k), candidates, chosen, out);
      }
      if (finest) {
        append_groups(view, query.kv_head, levels[k], candidates, chosen, out);
        return {};
      }
      candidates = children_of_chosen(
          candidates.ranges, chosen, levels[k].offsets + query.kv_head * (levels[k].count + 1),
          sizes_of(query, k + 1), half(workspace.ranges, k), half(workspace.sizes, k));
    }
  }

 private:
  bool by_codes(const LayerView& view) const {
    return tree_ && view.levels > 0 && view.key_codes.bits > 0;
  }
  // A level in use as an index into LayerView::level.
  int level_of(const LayerView& view, int k) const {
    return view.levels - static_cast<int>(groups_[&view - index_.layers.data()].size()) + k;
  }
  // Keys of every group of a level.
  const uint32_t* sizes_of(const SelectQuery& query, int k) const {
    const GroupLevel& level = groups_[query.layer][k];
    return level.sizes == nullptr ? ones_.data() : level.sizes + query.kv_head * level.count;
  }

  static void append_groups(const LayerView& view, int64_t head, const GroupLevel& level,
                            const Candidates& candidates, std::span<const uint8_t> chosen,
                            HeadSelection& out) {
    if (level.offsets == nullptr) {
      for_each_chosen(candidates.ranges, chosen, [&](size_t, uint32_t group) {
        const int64_t first = group * level.width;
        const int64_t end = std::min(first + level.width, view.slots);
        out.read.append({static_cast<uint32_t>(first), static_cast<uint32_t>(end - first)});
      });
      return;
    }
    const uint32_t* offsets = level.offsets + head * (level.count + 1);
    for_each_chosen(candidates.ranges, chosen, [&](size_t, uint32_t group) {
      out.read.append({offsets[group], offsets[group + 1] - offsets[group]});
    });
  }

  static void add_unread(int level, const Candidates& candidates, std::span<const uint8_t> chosen,
                         HeadSelection& out) {
    size_t i = 0;
    for (const ClusterRange& range : candidates.ranges) {
      const uint32_t end = range.first + range.count;
      for (uint32_t cluster = range.first; cluster < end; ++cluster, ++i) {
        if (chosen[i] != 0 || candidates.sizes[i] == 0) continue;
        out.clusters.append({static_cast<uint32_t>(level), cluster, 1});
      }
    }
  }

  // ---- Key codes: the clusters say how many keys are read, and the codes of more keys which.

  int64_t keys_with_codes(const Choice& choice) const {
    return std::llround(plan_.alive * static_cast<double>(choice.keys));
  }

  // Coarser levels leave as many keys as codes will be read of.
  void let_through(const Choice& choice, std::span<uint32_t> order,
                   std::span<uint8_t> chosen) const {
    if (chosen_keys(choice, chosen) >= keys_with_codes(choice)) return;
    choose_best(choice, keys_with_codes(choice), order, chosen);
  }

  // As many keys as the chosen clusters have. `clusters`: the finest level, of `candidates`; chosen
  // in workspace.bytes.
  Status choose_keys(const SelectQuery& query, const Choice& clusters, const Candidates& candidates,
                     SelectWorkspace& workspace, HeadSelection& out) const {
    const LayerView& view = index_.layers[query.layer];
    const auto finest = static_cast<int>(groups_[query.layer].size()) - 1;
    const GroupLevel& level = groups_[query.layer][finest];
    const std::span<uint8_t> chosen = std::span(workspace.bytes).first(candidates.sizes.size());
    const int64_t wanted = chosen_keys(clusters, chosen);
    Choice through = clusters;
    through.finest = false;
    choose_best(through, std::max(wanted, keys_with_codes(clusters)), workspace.order, chosen);
    add_unread(view.levels - 1, candidates, chosen, out);
    out.means = std::count(chosen.begin(), chosen.end(), 1);
    const size_t most = workspace.scores.size();
    const auto half = [&](auto& all) { return std::span(all).subspan(finest % 2 * most, most); };
    const Candidates keys = children_of_chosen(
        candidates.ranges, chosen, level.offsets + query.kv_head * (level.count + 1), ones_.data(),
        half(workspace.ranges), half(workspace.sizes));
    out.codes = std::ssize(keys.sizes);

    const CodedHead codes = coded_head(view, view.key_codes, false, query.kv_head);
    ScoreProblem problem = score_problem(index_, query, keys);
    problem.coded = &codes;
    problem.products = &*workspace.products;
    const std::span<float> scores = std::span(workspace.scores).first(keys.sizes.size());
    const std::span<uint8_t> read = std::span(workspace.bytes).first(keys.sizes.size());
    SQZ_RETURN_IF_ERROR(score_clusters(problem, scores, workspace.floats));
    Choice single = clusters;
    single.scores = scores;
    single.sizes = keys.sizes;
    choose_best(single, wanted, workspace.order, read);
    append_keys(keys, read, out);
    add_weights(problem, codes, read, workspace.floats, out);
    return {};
  }

  // Adds runs of the keys that are read, and of the keys between them.
  static void append_keys(const Candidates& keys, std::span<const uint8_t> read,
                          HeadSelection& out) {
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

  SelectableIndex index_;
  SelectionPlan plan_;
  std::unique_ptr<GroupScorer> scorer_;
  bool tree_;
  std::vector<std::vector<GroupLevel>> groups_;  // [layers][levels in use]
  std::vector<uint32_t> ones_;                   // sizes of single keys and of pages
};

}  // namespace

std::unique_ptr<Selector> make_group_selector(const SelectableIndex& index,
                                              const SelectionPlan& plan,
                                              std::unique_ptr<GroupScorer> scorer, bool tree) {
  return std::make_unique<GroupSelector>(index, plan, std::move(scorer), tree);
}

}  // namespace sqz
