#include "libruntime/select/dense.h"

namespace sqz {
namespace {

class DenseSelector final : public Selector {
 public:
  explicit DenseSelector(const SelectableIndex& index) : layers_(index.layers) {}

  SelectorLimits limits() const override { return {.runs = 1, .estimated = 0, .workspace = {}}; }

  Status select(const SelectQuery& query, SelectWorkspace& /*workspace*/,
                HeadSelection& out) const override {
    const int64_t slots = layers_[query.layer].slots;
    out.run_count = slots > 0 ? 1 : 0;
    if (slots > 0) out.runs[0] = {0, static_cast<uint32_t>(slots)};
    out.keys = slots;
    out.estimated_count = out.estimated_clusters = out.centroids = 0;
    return {};
  }

 private:
  std::span<const LayerView> layers_;
};

}  // namespace

std::unique_ptr<Selector> make_dense_selector(const SelectableIndex& index) {
  return std::make_unique<DenseSelector>(index);
}

}  // namespace sqz
