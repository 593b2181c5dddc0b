// The selector `stream` (StreamingLLM): the sink and the most recent keys, whatever is asked.
//
// Sink and tail are always read; of the keys between them, those with the highest token positions,
// as many as the budget leaves. In token order they are one run, in cluster order many short ones.
#include <algorithm>
#include <cmath>

#include "libruntime/select/registry.h"
#include "libruntime/select/runs.h"

namespace sqz {
namespace {

class StreamSelector final : public Selector {
 public:
  StreamSelector(std::span<const LayerView> layers, int64_t sink, int64_t recent)
      : layers_(layers), sink_(sink), recent_(recent) {}

  SelectorLimits limits() const override {
    SelectorLimits limits;
    for (const LayerView& view : layers_) {
      limits.runs = std::max(limits.runs, std::min(recent_, (view.slots + 1) / 2));
    }
    return limits;
  }

  Status select(const SelectQuery& query, SelectWorkspace& /*workspace*/,
                HeadSelection& out) const override {
    const LayerView& view = layers_[query.layer];
    const uint32_t* positions = view.positions + query.kv_head * view.slots;
    const int64_t first = sink_ + view.slots - recent_;
    clear(out);
    for (uint32_t slot = 0; slot < view.slots; ++slot) {
      if (positions[slot] >= first) append_run(out, slot, slot + 1);
    }
    return {};
  }

 private:
  std::span<const LayerView> layers_;
  int64_t sink_, recent_;
};

}  // namespace

Result<PreparedSelector> prepare_stream(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  SQZ_RETURN_IF_ERROR(check_amount(request));
  SQZ_RETURN_IF_ERROR(check_plain(request, "stream", false));
  const LayerView* view = first_sparse(inputs.index.layers);
  PreparedSelector out;
  if (view == nullptr) return PreparedSelector{dense_plan(out.plan, true), nullptr};
  const ReadingCost cost{.tokens = static_cast<double>(view->slots + view->exact),
                         .fixed = static_cast<double>(view->exact),
                         .per_keep = static_cast<double>(view->slots),
                         .fixed_names = "sink and tail"};
  resolve(cost, request, out.plan);
  SQZ_RETURN_IF_ERROR(settle(cost, request, inputs.path, out.plan));
  if (out.plan.dense) return out;
  out.selector = std::make_unique<StreamSelector>(inputs.index.layers, inputs.metadata.sink,
                                                  whole_keys(out.plan, view->slots));
  return out;
}

}  // namespace sqz
