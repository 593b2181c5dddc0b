#include "libindex/calibrate_keys.h"

#include <algorithm>

#include "formats/base/parallel.h"
#include "libindex/calibrate.h"
#include "libruntime/select/score.h"

namespace sqz {
namespace {

constexpr int64_t kGrid = Calibration::kGrid;

}  // namespace

KeyCalibrator::KeyCalibrator(const ModelDescription& model, DType dtype, std::string source)
    : model_(model), dtype_(dtype), source_(std::move(source)) {}

Status KeyCalibrator::add_layer(int64_t layer, std::span<const std::byte> keys,
                                std::span<const float> queries, const std::vector<int64_t>& calls,
                                int threads) {
  const int64_t heads = model_.kv_heads, group = model_.group_size(), dim = model_.head_dim;
  const int64_t n = std::ssize(queries) / (model_.query_heads * dim);
  queries_ = std::max(queries_, n);
  const auto units = calibration_units(calls, n);
  const int64_t head_bytes = std::ssize(keys) / heads;
  ScoreProblem shape;
  shape.dtype = dtype_;
  shape.dim = dim;
  shape.clusters = head_bytes / (dim * dtype_size(dtype_));
  shape.group = group;
  shape.scale = static_cast<float>(model_.attention_scale);
  const std::vector<uint32_t> ones(static_cast<size_t>(shape.clusters), 1u);
  shape.sizes = ones.data();

  std::vector<Head> added(static_cast<size_t>(Calibration::kScopes * heads));
  SQZ_RETURN_IF_ERROR(parallel_for(std::ssize(added), threads, [&](int64_t i) {
    const int64_t head = i / Calibration::kScopes, scope = i % Calibration::kScopes;
    added[i].layer = layer;
    added[i].kv_head = head;
    ScoreProblem problem = shape;
    problem.centroids = keys.data() + head * head_bytes;
    std::vector<float> scores(ones.size()), workspace;
    for (const CalibrationUnit& unit : units[scope]) {
      problem.tokens = unit.count;
      problem.queries = queries.data() + (head * n + unit.first) * group * dim;
      workspace.resize(std::max(workspace.size(), static_cast<size_t>(score_workspace(problem))));
      const Status status = score_clusters(problem, scores, workspace);
      if (!status.ok()) {
        return Status(status.code(), concat("calibration of single keys of layer ", layer,
                                            ", KV head ", head, ": ", status.message()));
      }
      for (const float score : scores) added[i].sketch.add(score, 1);
    }
    return Status();
  }));
  for (size_t i = 0; i < added.size(); ++i) {
    heads_[i % Calibration::kScopes].push_back(std::move(added[i]));
  }
  return Status();
}

void KeyCalibrator::finish(Calibration& calibration) const {
  calibration.key_thresholds.resize(static_cast<size_t>(Calibration::kScopes * kGrid));
  calibration.key_shares.assign(
      static_cast<size_t>(Calibration::kScopes * model_.layers * model_.kv_heads * kGrid), 1.0f);
  if (calibration.source.empty()) {
    calibration.queries = queries_;
    calibration.source = source_;
  }
  for (int64_t scope = 0; scope < Calibration::kScopes; ++scope) {
    ScoreSketch all;
    for (const Head& head : heads_[scope]) all.merge(head.sketch);
    const std::span<float> curve =
        std::span(calibration.key_thresholds).subspan(static_cast<size_t>(scope * kGrid), kGrid);
    all.fill_curve(curve);
    for (const Head& head : heads_[scope]) {
      const std::vector<float> kept = head.sketch.kept(curve);
      const int64_t row = (scope * model_.layers + head.layer) * model_.kv_heads + head.kv_head;
      std::copy(kept.begin(), kept.end(), calibration.key_shares.begin() + row * kGrid);
    }
  }
}

}  // namespace sqz
