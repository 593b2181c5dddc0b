#include <algorithm>
#include <thread>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/upload.h"
#include "training/weights.h"

namespace sqz::training {

Status upload_weights(std::span<const WeightCopy> copies) {
  constexpr unsigned kMostThreads = 12;  // as many as the bus can use
  const unsigned cores = std::thread::hardware_concurrency();
  const int threads = static_cast<int>(std::clamp(cores, 1u, kMostThreads));
  std::vector<at::Tensor> raw;  // on the GPU, as the file has it
  std::vector<sqz::cuda::Copy> pieces;
  for (const WeightCopy& copy : copies) {
    const bool same = copy.to.scalar_type() == copy.type;
    raw.push_back(same ? copy.to : at::empty(copy.to.sizes(), copy.to.options().dtype(copy.type)));
    pieces.push_back({.from = copy.from.data(),
                      .to = static_cast<std::byte*>(raw.back().data_ptr()),
                      .bytes = copy.from.size(),
                      .of_file = false});
  }
  if (pieces.empty()) return {};
  const int device = copies.front().to.get_device();
  SQZ_ASSIGN_OR_RETURN(const auto upload,
                       sqz::cuda::Upload::start(nullptr, device, threads, 1, pieces));
  SQZ_RETURN_IF_ERROR(upload->wait(0));
  for (size_t i = 0; i < copies.size(); ++i) {
    if (!raw[i].is_same(copies[i].to)) at::Tensor(copies[i].to).copy_(raw[i]);
  }
  SQZ_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());  // other streams will read them
  return {};
}

}  // namespace sqz::training
