// Training samples of a bounded number of windows; a new window takes the place of the oldest.
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

  // Of window number `window` (counted from 0, in the order of training): the heads of one layer,
  // from head `first` of the network on.
  void put(int64_t window, int64_t first, const TrainSamples& samples);

  // Windows up to number `end` were put. Rows of a batch come from windows drawn one by one; each
  // head has queries of its own. Follows from the seed alone. Not inference tensors.
  NetworkBatch draw(int64_t end, int64_t rows, uint64_t seed) const;

  int64_t windows() const { return queries_.size(0); }

 private:
  at::Tensor queries_;    // [windows, n, rows, d] float32
  at::Tensor masses_;     // [windows, n, rows, C] float16, as are
  at::Tensor log_sizes_;  // the sizes' logs
  at::Tensor counts_;     // [windows, n] float64: rows that are there
};

}  // namespace sqz::training
