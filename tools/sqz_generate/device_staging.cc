#include "tools/sqz_generate/device_staging.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"

namespace sqz {
namespace {

class CudaStaging final : public DeviceStaging {
 public:
  explicit CudaStaging(int device) : device_(device) {}

  Status load(const float* from, size_t q_floats, size_t lse_floats) override {
    const cuda::CurrentDevice current(device_);
    q_floats_ = q_floats;
    lse_floats_ = lse_floats;
    const auto lay_out = [&](void* base) {
      cuda::Layout layout(base);
      q = layout.take<float>(static_cast<int64_t>(q_floats));
      out = layout.take<float>(static_cast<int64_t>(q_floats));
      lse = layout.take<float>(static_cast<int64_t>(lse_floats));
      return layout.used();
    };
    SQZ_RETURN_IF_ERROR(memory_.reserve(lay_out(nullptr)));
    lay_out(memory_.data());
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(q, from, q_floats * sizeof(float), cudaMemcpyHostToDevice));
    return {};
  }

  Status store(float* to_out, float* to_lse) override {
    const cuda::CurrentDevice current(device_);
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(to_out, out, q_floats_ * sizeof(float), cudaMemcpyDeviceToHost));
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(to_lse, lse, lse_floats_ * sizeof(float), cudaMemcpyDeviceToHost));
    return {};
  }

 private:
  int device_;
  size_t q_floats_ = 0, lse_floats_ = 0;
  cuda::DeviceMemory memory_;
};

}  // namespace

Result<std::unique_ptr<DeviceStaging>> DeviceStaging::create(int device) {
  return std::unique_ptr<DeviceStaging>(std::make_unique<CudaStaging>(device));
}

}  // namespace sqz
