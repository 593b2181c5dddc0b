#include "tools/sqz_generate/device_staging.h"

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"

namespace sqz {
namespace {

class CudaStaging final : public DeviceStaging {
 public:
  explicit CudaStaging(int device) : device_(device) {}

  Status load(const void* from, size_t q_bytes, size_t lse_floats) override {
    const cuda::CurrentDevice current(device_);
    q_bytes_ = q_bytes;
    lse_bytes_ = lse_floats * sizeof(float);
    const auto lay_out = [&](void* base) {
      cuda::Layout layout(base);
      q = layout.take<std::byte>(static_cast<int64_t>(q_bytes_));
      out = layout.take<std::byte>(static_cast<int64_t>(q_bytes_));
      lse = layout.take<std::byte>(static_cast<int64_t>(lse_bytes_));
      return layout.used();
    };
    SQZ_RETURN_IF_ERROR(memory_.reserve(lay_out(nullptr)));
    lay_out(memory_.data());
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(q, from, q_bytes_, cudaMemcpyHostToDevice));
    return {};
  }

  Status store(void* to_out, float* to_lse) override {
    const cuda::CurrentDevice current(device_);
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(to_out, out, q_bytes_, cudaMemcpyDeviceToHost));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(to_lse, lse, lse_bytes_, cudaMemcpyDeviceToHost));
    return {};
  }

 private:
  int device_;
  size_t q_bytes_ = 0, lse_bytes_ = 0;
  cuda::DeviceMemory memory_;
};

}  // namespace

Result<std::unique_ptr<DeviceStaging>> DeviceStaging::create(int device) {
  return std::unique_ptr<DeviceStaging>(std::make_unique<CudaStaging>(device));
}

}  // namespace sqz
