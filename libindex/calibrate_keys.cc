#include "libindex/calibrate_keys.h"

#include <algorithm>

namespace sqz {

KeyCalibrator::KeyCalibrator(const IndexMetadata& metadata, std::string source)
    : input_(calibration_input(metadata, std::move(source))) {}

Status KeyCalibrator::add_layer(int64_t layer, std::span<const std::byte> keys,
                                std::span<const float> queries, const std::vector<int64_t>& calls,
                                int threads) {
  const int64_t row = input_.kv_heads * input_.dim;
  const int64_t slots = std::ssize(keys) / (row * dtype_size(input_.dtype));
  input_.queries = std::ssize(queries) / (row * input_.group);
  input_.calls = calls;
  CalibrationLayer& single = input_.sparse.emplace_back();
  single.layer = layer;
  single.queries.assign(queries.begin(), queries.end());
  CalibrationLayer::Level& level = single.levels.emplace_back();
  level.centroids.assign(keys.begin(), keys.end());
  for (int64_t i = 0; i < input_.kv_heads * (slots + 1); ++i) {
    level.children.push_back(static_cast<uint32_t>(i % (slots + 1)));
  }
  std::vector<CalibrationSketches> heads(static_cast<size_t>(input_.kv_heads));
  const Status status =
      make_cpu_calibration_scorer(input_, threads)
          ->run({}, [&](int64_t head, CalibrationSketches& found) { heads[head] = found; });
  layers_.emplace_back(layer, std::move(heads));
  input_.sparse.clear();
  return status;
}

void KeyCalibrator::finish(Calibration& calibration) const {
  constexpr int64_t kScopes = Calibration::kScopes, kGrid = Calibration::kGrid;
  calibration.key_thresholds.resize(static_cast<size_t>(kScopes * kGrid));
  calibration.key_shares.assign(
      static_cast<size_t>(kScopes * input_.layers * input_.kv_heads * kGrid), 1.0f);
  if (calibration.source.empty()) {
    calibration.queries = input_.queries;
    calibration.source = input_.source;
  }
  for (int64_t scope = 0; scope < kScopes; ++scope) {
    ScoreSketch all;
    for (const auto& [layer, heads] : layers_) {
      for (const CalibrationSketches& head : heads) all.merge(head[scope]);
    }
    const auto curve = std::span(calibration.key_thresholds).subspan(scope * kGrid, kGrid);
    all.fill_curve(curve);
    for (const auto& [layer, heads] : layers_) {
      auto to = calibration.key_shares.begin() +
                (scope * input_.layers + layer) * input_.kv_heads * kGrid;
      for (const CalibrationSketches& head : heads) {
        const std::vector<float> kept = head[scope].kept(curve);
        to = std::copy(kept.begin(), kept.end(), to);
      }
    }
  }
}

}  // namespace sqz
