#include "libruntime/select/dense.h"

#include "libruntime/select/registry.h"
#include "libruntime/select/runs.h"

namespace sqz {
namespace {

class DenseSelector final : public Selector {
 public:
  explicit DenseSelector(const SelectableIndex& index) : layers_(index.layers) {}

  SelectorLimits limits() const override { return {.runs = 1, .estimated = 0, .workspace = {}}; }

  Status select(const SelectQuery& query, SelectWorkspace& /*workspace*/,
                HeadSelection& out) const override {
    clear(out);
    append_run(out, 0, static_cast<uint32_t>(layers_[query.layer].slots));
    return {};
  }

 private:
  std::span<const LayerView> layers_;
};

}  // namespace

std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index) {
  return std::make_unique<DenseSelector>(index);
}

Result<PreparedSelector> prepare_dense(const SelectorInputs&, const SelectionRequest& request) {
  if (request.budget != 0 || request.keep != 0 || request.thresholds != nullptr) {
    return Status(Code::kInvalidArgument,
                  "selector dense reads everything: found a budget, keep or thresholds, "
                  "expected none");
  }
  return PreparedSelector{dense_plan({}, false), nullptr};
}

}  // namespace sqz
