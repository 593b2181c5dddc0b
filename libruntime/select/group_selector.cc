#include "libruntime/select/group_selector.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

class GroupSelector final : public Selector {
 public:
  GroupSelector(const SelectableIndex& index, const SelectionPlan& plan,
                std::unique_ptr<GroupScorer> scorer)
      : index_(index), plan_(plan), scorer_(std::move(scorer)) {
    int64_t most = 0;
    for (size_t l = 0; l < index_.layers.size(); ++l) {
      groups_.push_back(scorer_->levels(index_.layers[l], index_.tables[l]));
      for (const GroupLevel& level : groups_.back()) {
        if (level.sizes == nullptr) most = std::max(most, level.count);
      }
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
      for (int k = 0; k < levels; ++k) {
        limits.choose_among(groups_[l][k].count);
        scorer_->reserve(view, k, limits);
      }
      descends |= levels > 1;
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

  SelectableIndex index_;
  SelectionPlan plan_;
  std::unique_ptr<GroupScorer> scorer_;
  std::vector<std::vector<GroupLevel>> groups_;  // [layers][levels in use]
  std::vector<uint32_t> ones_;                   // sizes of pages
};

}  // namespace

std::unique_ptr<Selector> make_group_selector(const SelectableIndex& index,
                                              const SelectionPlan& plan,
                                              std::unique_ptr<GroupScorer> scorer) {
  return std::make_unique<GroupSelector>(index, plan, std::move(scorer));
}

}  // namespace sqz
