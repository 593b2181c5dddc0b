// Made-up centroids and queries to calibrate with.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "libindex/calibrate.h"
#include "tests/libindex/clustered_data.h"

namespace sqz::test {

inline constexpr int64_t kCalibrationHeads = 2, kCalibrationGroup = 3, kCalibrationDim = 16,
                         kCalibrationQueries = 25, kCalibrationLayers = 4;
inline constexpr int64_t kCalibrationSparse[] = {0, 2, 3};  // layer 1 is dense

// Layers with `clusters` per level, random children and centroids spread enough for S to vary over
// many orders of magnitude.
inline CalibrationInput make_input(const std::vector<int64_t>& clusters, int64_t keys) {
  CalibrationInput input;
  input.layers = kCalibrationLayers;
  input.kv_heads = kCalibrationHeads;
  input.group = kCalibrationGroup;
  input.dim = kCalibrationDim;
  input.queries = kCalibrationQueries;
  input.scale = 0.25f;
  input.coarse_keep = 0.5;
  input.source = "tail";
  Rng rng(11);
  for (int64_t l : kCalibrationSparse) {
    CalibrationLayer& layer = input.sparse.emplace_back();
    layer.layer = l;
    for (size_t k = 0; k < clusters.size(); ++k) {
      CalibrationLayer::Level& level = layer.levels.emplace_back();
      const int64_t below = k + 1 < clusters.size() ? clusters[k + 1] : keys;
      for (int64_t h = 0; h < kCalibrationHeads; ++h) {
        // Distinct cuts of the children below, so that no cluster is empty.
        std::vector<uint32_t> cuts(static_cast<size_t>(below - 1));
        for (size_t i = 0; i < cuts.size(); ++i) cuts[i] = static_cast<uint32_t>(i + 1);
        for (size_t i = cuts.size(); i > 1; --i) {
          std::swap(cuts[i - 1], cuts[rng.below(static_cast<int64_t>(i))]);
        }
        cuts.resize(static_cast<size_t>(clusters[k] - 1));
        cuts.push_back(0);
        cuts.push_back(static_cast<uint32_t>(below));
        std::sort(cuts.begin(), cuts.end());
        level.children.insert(level.children.end(), cuts.begin(), cuts.end());
      }
      level.centroids.resize(
          static_cast<size_t>(kCalibrationHeads * clusters[k] * kCalibrationDim * 2));
      for (size_t i = 0; i < level.centroids.size(); i += 2) {
        const uint16_t bits = to_bfloat16(1.5f * rng.normal()).bits;
        std::memcpy(&level.centroids[i], &bits, 2);
      }
    }
    layer.queries.resize(static_cast<size_t>(kCalibrationHeads * kCalibrationQueries *
                                             kCalibrationGroup * kCalibrationDim));
    for (float& x : layer.queries) x = rng.normal();
  }
  return input;
}

}  // namespace sqz::test
