// In place of training/cuda/upload_weights.cc in a build whose own kernels are not CUDA's, though
// LibTorch may be.
#include <cstring>

#include "training/weights.h"

namespace sqz::training {

Status upload_weights(std::span<const WeightCopy> copies) {
  for (const WeightCopy& copy : copies) {
    const at::Tensor raw = at::empty(copy.to.sizes(), copy.type);
    std::memcpy(raw.data_ptr(), copy.from.data(), copy.from.size());
    at::Tensor(copy.to).copy_(raw);
  }
  return {};
}

}  // namespace sqz::training
