// libindex/layer_engine.h on a CUDA device: k-means of every level, means, slot order and permuted
// rows without a trip through the host. KV heads are processed in groups, as many at once as fit
// the free device memory.
#pragma once

#include "libindex/layer_engine.h"
#include "libruntime/cuda/device.h"

namespace sqz::cuda {

// The number of components that k-means computes with: `dim` filled up with zeros to 32, 64, 96,
// 128 or 256, which changes no cosine. 0 where it is above 256.
int64_t padded_dim(int64_t dim);

class CudaLayerEngine final : public LayerEngine {
 public:
  explicit CudaLayerEngine(int gpu) : gpu_(gpu) {}

  Result<LayerMemory> memory(const LayerProblem& problem) const override;
  Status fill(const LayerProblem& problem, const std::function<void(int64_t, int64_t)>& progress,
              LayerBuffers& buffers) override;
  std::unique_ptr<CalibrationScorer> calibration_scorer(const CalibrationInput& input) override;

  // Pretends that the device has this much free memory; for tests.
  void limit_memory(size_t bytes) { limit_ = bytes; }

 private:
  Status prepare();
  Result<int64_t> group_size(const LayerProblem& problem);

  int gpu_;
  size_t limit_ = SIZE_MAX;
  Stream stream_, second_stream_;
  DeviceMemory memory_;
};

}  // namespace sqz::cuda
