// Makes all tensors of a layer from its keys and values on the device of an engine: clusters of
// every level, slot order, means, permuted rows. The result has the meaning of build_trees(),
// depth_first_order() and LayerStore::fill_sparse() together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "formats/base/device_rows.h"
#include "libindex/calibration_scorer.h"
#include "libindex/layer_store.h"
#include "libindex/tree.h"

namespace sqz {

struct LayerProblem {
  int64_t heads = 0, tokens = 0, dim = 0;  // Hkv, N, d
  int64_t sink = 0;                        // first tokens that are not clustered
  int64_t clustered = 0;                   // M: the tokens after them; the rest is the tail
  TreeOptions tree;                        // clusters, iterations, seed, layer
  DType dtype = DType::kBF16;              // of what is stored

  // One of the two, borrowed for the call.
  std::span<const float> keys, values;  // [Hkv, N, d] on the host
  const DeviceRows* device = nullptr;   // null, or on the engine's device
};

// Bytes on the engine's device with all KV heads of a layer at once, and with one at a time.
struct LayerMemory {
  uint64_t whole = 0, least = 0;
};

class LayerEngine {
 public:
  virtual ~LayerEngine() = default;

  // The memory that fill() would take if there is room. It looks at the shapes alone:
  // problem.device is null or any rows.
  virtual Result<LayerMemory> memory(const LayerProblem& problem) const = 0;

  // kNumeric names layer, KV head and token of a key or value that is NaN, infinite or beyond the
  // stored dtype. Where memory is short, KV heads are processed in groups, with the same result;
  // kOutOfMemory says how much one KV head needs, and what to lower. `progress(done,
  // total)` counts KV heads. Without clusters (M = 0) tokens problem.sink .. N - 1 are stored.
  virtual Status fill(const LayerProblem& problem,
                      const std::function<void(int64_t, int64_t)>& progress,
                      LayerBuffers& buffers) = 0;

  // Calibration on the engine's device. The engine and `input` must outlive it.
  virtual std::unique_ptr<CalibrationScorer> calibration_scorer(const CalibrationInput& input) = 0;
};

}  // namespace sqz
