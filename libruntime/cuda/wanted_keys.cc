#include "libruntime/cuda/wanted_keys.h"

#include <cmath>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {

std::vector<uint32_t> wanted_keys(const SelectionPlan& plan, int scope, const ServedIndex& index) {
  const auto heads = static_cast<size_t>(index.metadata().model.kv_heads);
  const std::vector<float>& shares = plan.shares[static_cast<size_t>(scope)];
  std::vector<uint32_t> wanted(index.layers.size() * heads);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto slots = static_cast<double>(index.layers[i / heads].slots);
    wanted[i] = static_cast<uint32_t>(std::llround(shares[i] * slots));
  }
  return wanted;
}

Status upload_wanted_keys(const SelectionPlan& plan, const ServedIndex& index, uint32_t* wanted) {
  if (plan.shares.empty()) return {};
  for (int scope = 0; scope < kScopes; ++scope) {
    const std::vector<uint32_t> keys = wanted_keys(plan, scope, index);
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(wanted + static_cast<size_t>(scope) * keys.size(),
                                        keys.data(), keys.size() * sizeof(uint32_t),
                                        cudaMemcpyHostToDevice));
  }
  return {};
}

}  // namespace sqz::cuda
