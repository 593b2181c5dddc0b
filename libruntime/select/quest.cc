// The selector `quest`: pages of consecutive tokens, scored by an upper bound of the logits of
// their keys, sum over c of max(q_c min_c, q_c max_c) (Quest, section 3.3); the best ones that the
// budget pays, what the bounds themselves cost included.
//
// A page's score for several queries is the mean of its bounds, over the block's tokens and the
// group's heads. The bound is max(q, 0) . max + min(q, 0) . min, linear in the two parts of q: so
// the mean of the bounds is the bound of the mean parts.
#include <algorithm>
#include <cmath>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

class QuestSelector final : public Selector {
 public:
  QuestSelector(const SelectableIndex& index, std::unique_ptr<Rule> rule)
      : index_(index), rule_(std::move(rule)) {}

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      limits.choose_among(view.pages);
      limits.use_floats(2 * (view.head_dim + padded_dim(view.head_dim)));
    }
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& workspace,
                HeadSelection& out) const override {
    const LayerView& view = index_.layers[query.layer];
    const std::span<float> scores = std::span(workspace.scores).first(view.pages);
    SQZ_RETURN_IF_ERROR(score(query, workspace.floats.data(), scores));
    const std::span<uint8_t> chosen = std::span(workspace.bytes).first(view.pages);
    rule_->choose({.layer = query.layer, .kv_head = query.kv_head, .scores = scores, .sizes = {}},
                  workspace.order, chosen);
    out.clear();
    out.centroids = 2 * view.pages;
    for (int64_t page = 0; page < view.pages; ++page) {
      if (chosen[page] == 0) continue;
      const int64_t first = page * view.page_size;
      const int64_t end = std::min(first + view.page_size, view.slots);
      out.read.append({static_cast<uint32_t>(first), static_cast<uint32_t>(end - first)});
    }
    return {};
  }

 private:
  Status score(const SelectQuery& query, float* floats, std::span<float> scores) const {
    const LayerView& view = index_.layers[query.layer];
    const int64_t dim = view.head_dim;
    float* upper = floats;
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

  SelectableIndex index_;
  std::unique_ptr<Rule> rule_;
};

}  // namespace

Result<PreparedSelector> prepare_quest(const SelectorInputs& inputs,
                                       const SelectionRequest& request) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, "quest", false));
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{nothing_sparse_plan(request), nullptr};
  if (view->pages == 0) {
    return Status(Code::kUnsupported,
                  bad_field(inputs.path, "partition", partition_name(inputs.metadata.partition),
                            "pages: selector quest needs an index built with --partition pages"));
  }
  // A page's two bounds cost as much as one key and its value.
  const auto slots = static_cast<double>(view->slots), page = static_cast<double>(view->page_size);
  const ReadingCost cost{.tokens = slots + static_cast<double>(view->exact),
                         .fixed = static_cast<double>(view->exact + view->pages),
                         .per_keep = slots,
                         .least_keep = std::min(page / slots, 1.0),
                         .fixed_names = "bounds, one page, sink and tail"};
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.plan.layer_keep = inputs.layer_keep;
  std::vector<int64_t> pages = layer_keys(out.plan, view->slots);
  for (int64_t& count : pages) count /= view->page_size;
  out.selector = std::make_unique<QuestSelector>(inputs.index, make_top_rule(std::move(pages)));
  return out;
}

}  // namespace sqz
