#include "libruntime/cuda/wanted_keys.h"

#include <cmath>
#include <vector>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/select/layer_spread.h"

namespace sqz::cuda {
namespace {

void count_pages(const SelectionPlan& plan, const ServedIndex& index,
                 std::vector<uint32_t>& wanted) {
  const LayerView* sparse = first_sparse(index.layers);
  if (plan.dense || sparse == nullptr || sparse->pages == 0) return;
  const auto heads = static_cast<size_t>(sparse->kv_heads);
  const std::vector<int64_t> keys = layer_keys(plan, sparse->slots);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!plan.selects(static_cast<int64_t>(i / heads))) continue;
    wanted[i] = static_cast<uint32_t>(keys[i / heads] / index.layers[i / heads].page_size);
  }
}

// [layers, Hkv]
std::vector<uint32_t> wanted_keys(const SelectionPlan& plan, int scope, const ServedIndex& index) {
  const auto heads = static_cast<size_t>(index.metadata().model.kv_heads);
  std::vector<uint32_t> wanted(index.layers.size() * heads);
  if (plan.head_keep.empty()) {
    count_pages(plan, index, wanted);
    return wanted;
  }
  const std::vector<float>& shares = plan.head_keep[static_cast<size_t>(scope)];
  const auto of_layer = static_cast<size_t>(index.whole().metadata().model.kv_heads);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto slots = static_cast<double>(index.layers[i / heads].slots);
    const size_t head = static_cast<size_t>(index.first_head) + i % heads;
    wanted[i] = static_cast<uint32_t>(std::llround(shares[i / heads * of_layer + head] * slots));
  }
  return wanted;
}

}  // namespace

Status upload_wanted_keys(const SelectionPlan& plan, const ServedIndex& index, int scopes,
                          uint32_t* wanted) {
  for (int scope = 0; scope < scopes; ++scope) {
    const std::vector<uint32_t> keys = wanted_keys(plan, scope, index);
    SQZ_RETURN_IF_ERROR(write_device(wanted + static_cast<size_t>(scope) * keys.size(), keys));
  }
  return {};
}

}  // namespace sqz::cuda
