// Calibration of the selector `ideal`: the curves of Calibration with every key in place of a
// cluster, scored by its own attention weight (Squeezed Attention, appendix E). Layer by layer: it
// needs a layer's keys only while it is added.
#pragma once

#include <utility>

#include "libindex/calibration_scorer.h"

namespace sqz {

class KeyCalibrator {
 public:
  KeyCalibrator(const IndexMetadata& metadata, std::string source);

  // keys: [Hkv, M, d] in the index's dtype, any order; queries: [Hkv, n, group, d]
  // (group_queries()) with the calls that they are of, as in CalibrationInput. kNumeric, naming
  // layer and KV head, where a logit is NaN or infinite. The result depends neither on the threads
  // nor on the order of layers.
  Status add_layer(int64_t layer, std::span<const std::byte> keys, std::span<const float> queries,
                   const std::vector<int64_t>& calls, int threads);

  // Fills key_thresholds and key_shares, and queries and source if nothing else has. Layers that
  // were not added are dense: their shares are 1.
  void finish(Calibration& calibration) const;

 private:
  CalibrationInput input_;  // of one layer at a time
  std::vector<std::pair<int64_t, std::vector<CalibrationSketches>>> layers_;
};

}  // namespace sqz
