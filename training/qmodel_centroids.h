// The buckets of a classifier: spherical k-means, by libindex, of keys from many windows.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "training/qmodel_samples.h"

namespace sqz::training {

struct CentroidOptions {
  int64_t buckets = 0;
  int64_t keys = 0;  // of each KV head, drawn evenly from the windows
  int64_t sink = 1;  // the first tokens of a window are left out
  uint64_t seed = 0;
  int threads = 0;
  std::vector<int64_t> layers;
  at::Device device = at::kCPU;  // of the windows' tensors
  std::function<void(double done)> progress = [](double) {};
};

// [layers, Hkv, C, d] float32 unit vectors on the CPU. Runs the model over every window.
Result<at::Tensor> find_centroids(Runner& runner, std::span<const TokenText> windows,
                                  const CentroidOptions& options);

}  // namespace sqz::training
