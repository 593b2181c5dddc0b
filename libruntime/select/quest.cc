// The selector `quest`: pages of consecutive tokens, scored by an upper bound of the logits of
// their keys, sum over c of max(q_c min_c, q_c max_c) (Quest, section 3.3); the best ones that the
// budget pays, what the bounds themselves cost included.
//
// Several queries: the bound is max(q, 0) . max + min(q, 0) . min, linear in the two parts of q, so
// that the mean over queries is the bound of their mean parts. Policies: the mean over tokens and
// heads; the max over heads of the mean over tokens; the max over all.
#include <algorithm>
#include <cmath>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/select/layer_spread.h"
#include "libruntime/select/registry.h"
#include "libruntime/select/runs.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

class QuestSelector final : public Selector {
 public:
  QuestSelector(const SelectableIndex& index, GroupPolicy policy, std::unique_ptr<Rule> rule)
      : index_(index), policy_(policy), rule_(std::move(rule)) {}

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : index_.layers) {
      limits.choose_among(view.pages);
      limits.use_floats(kFewRows *
                        (2 * view.head_dim + 2 * padded_dim(view.head_dim) + view.pages));
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
    clear(out);
    out.centroids = 2 * view.pages;
    for (int64_t page = 0; page < view.pages; ++page) {
      if (chosen[page] == 0) continue;
      const int64_t first = page * view.page_size;
      append_run(out, static_cast<uint32_t>(first),
                 static_cast<uint32_t>(std::min(first + view.page_size, view.slots)));
    }
    return {};
  }

 private:
  // Rows of queries, in their positive and negative parts.
  struct Rows {
    float* upper;  // [kFewRows, d]
    float* lower;
    int64_t count = 0;
  };

  Status score(const SelectQuery& query, float* floats, std::span<float> scores) const {
    const int64_t dim = index_.layers[query.layer].head_dim;
    Rows rows{floats, floats + kFewRows * dim};
    float* scratch = floats + 2 * kFewRows * dim;
    std::fill(scores.begin(), scores.end(), -INFINITY);
    // A row is the mean of the queries of `tokens` tokens and `heads` heads.
    const auto add_mean = [&](int64_t first_token, int64_t tokens, int64_t first_head,
                              int64_t heads) {
      float* upper = rows.upper + rows.count * dim;
      float* lower = rows.lower + rows.count * dim;
      std::fill(upper, upper + dim, 0.0f);
      std::fill(lower, lower + dim, 0.0f);
      const float weight = 1.0f / static_cast<float>(tokens * heads);
      for (int64_t t = first_token; t < first_token + tokens; ++t) {
        for (int64_t h = first_head; h < first_head + heads; ++h) {
          const float* q = query.queries + t * query.token_stride + h * dim;
          for (int64_t c = 0; c < dim; ++c) {
            upper[c] += weight * std::max(q[c], 0.0f);
            lower[c] += weight * std::min(q[c], 0.0f);
          }
        }
      }
      if (++rows.count == kFewRows) flush(query, rows, scratch, scores);
    };
    if (policy_ == GroupPolicy::kMean) {
      add_mean(0, query.tokens, 0, index_.group);
    } else {
      const int64_t tokens = policy_ == GroupPolicy::kMax ? query.tokens : 1;
      for (int64_t t = 0; t < query.tokens; t += tokens) {
        for (int64_t h = 0; h < index_.group; ++h) add_mean(t, tokens, h, 1);
      }
    }
    flush(query, rows, scratch, scores);
    const bool finite =
        std::all_of(scores.begin(), scores.end(), [](float score) { return std::isfinite(score); });
    if (finite) return {};
    return {Code::kNumeric, "the product of a query and a page's bounds is NaN or infinite"};
  }

  // scores = max(scores, bounds of the rows).
  void flush(const SelectQuery& query, Rows& rows, float* scratch, std::span<float> scores) const {
    if (rows.count == 0) return;
    const LayerView& view = index_.layers[query.layer];
    const int64_t dim = view.head_dim, padded = padded_dim(dim);
    float* upper = scratch;
    float* lower = upper + kFewRows * padded;
    float* bounds = lower + kFewRows * padded;
    const CpuKernels& kernels = index_.kernels != nullptr ? *index_.kernels : cpu_kernels();
    kernels.pack(view.dtype, rows.upper, dim, rows.count, dim, upper);
    kernels.pack(view.dtype, rows.lower, dim, rows.count, dim, lower);
    const int64_t skip = query.kv_head * view.pages * dim * dtype_size(view.dtype);
    kernels.page_bounds(
        view.dtype, upper, lower, rows.count, static_cast<const std::byte*>(view.page_min) + skip,
        static_cast<const std::byte*>(view.page_max) + skip, view.pages, dim, bounds, view.pages);
    for (int64_t r = 0; r < rows.count; ++r) {
      const float* row = bounds + r * view.pages;
      // Written so that a NaN stays.
      for (int64_t p = 0; p < view.pages; ++p) scores[p] = scores[p] > row[p] ? scores[p] : row[p];
    }
    rows.count = 0;
  }

  SelectableIndex index_;
  GroupPolicy policy_;
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
  out.selector =
      std::make_unique<QuestSelector>(inputs.index, request.group, make_top_rule(std::move(pages)));
  return out;
}

}  // namespace sqz
