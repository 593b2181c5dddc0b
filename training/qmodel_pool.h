// Training samples of a bounded number of windows. A new window replaces the oldest one.
#pragma once

#include <cstdint>

#include "training/qmodel_network.h"
#include "training/qmodel_samples.h"

namespace sqz::training {

class SamplePool {
 public:
  // Room for `windows`, each with `rows` queries of every head of `shape`.
  SamplePool(const NetworkShape& shape, int64_t windows, int64_t rows, at::Device device);
  static uint64_t window_bytes(const NetworkShape& shape, int64_t rows);

  // Puts the heads of one layer of a window, from head `first` of the network on. Windows are
  // counted from 0, in the order of training.
  void put(int64_t window, int64_t first, const TrainSamples& samples);

  // Draws a batch from the windows before number `end`. Each row comes from a window of its own
  // draw, and each head has its own queries. The batch follows from the seed alone. Its tensors are
  // no inference tensors.
  NetworkBatch draw(int64_t end, int64_t rows, uint64_t seed) const;

  int64_t windows() const { return queries_.size(0); }

 private:
  at::Tensor queries_;             // [windows, n, rows, d] float32
  at::Tensor masses_, log_sizes_;  // [windows, n, rows, C] float16
  at::Tensor counts_;              // [windows, n] float64: number of rows
};

}  // namespace sqz::training
