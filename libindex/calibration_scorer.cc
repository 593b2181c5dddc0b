#include "libindex/calibration_scorer.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "formats/base/parallel.h"
#include "libindex/order.h"

namespace sqz {
namespace {

std::vector<std::vector<uint32_t>> head_children(const CalibrationInput& input,
                                                 const CalibrationLayer& layer, int64_t head) {
  std::vector<std::vector<uint32_t>> children;
  for (const CalibrationLayer::Level& level : layer.levels) {
    const int64_t stride = std::ssize(level.children) / input.kv_heads;
    const auto first = level.children.begin() + head * stride;
    children.emplace_back(first, first + stride);
  }
  return children;
}

// One KV head of one sparse layer, ready to be scored.
class Head {
 public:
  Head(const CalibrationInput& input, const CalibrationLayer& layer, int64_t head)
      : input_(input), queries_(layer.queries.data() + head * input.queries * query_floats()) {
    children_ = head_children(input, layer, head);
    sizes_ = calibration_sizes(input, layer, head);
    for (size_t k = 0; k < sizes_.size(); ++k) {
      const auto clusters = static_cast<int64_t>(sizes_[k].size());
      centroids_.push_back(layer.levels[k].centroids.data() +
                           head * clusters * input.dim * dtype_size(input.dtype));
      scores_.emplace_back(sizes_[k].size());
      ranges_.emplace_back(sizes_[k].size());
      alive_sizes_.emplace_back(sizes_[k].size());
      whole_.push_back({0, static_cast<uint32_t>(clusters)});
    }
    keys_ = std::accumulate(sizes_[0].begin(), sizes_[0].end(), uint64_t{0});
  }

  // All clusters of level `k` (0-based) are alive.
  void start(int k) { alive_ = {{&whole_[k], 1}, sizes_[k]}; }

  // Scores the alive clusters, which are of level `k`.
  Status score(int k, const CalibrationUnit& unit) {
    ScoreProblem problem;
    problem.dtype = input_.dtype;
    problem.dim = input_.dim;
    problem.clusters = std::ssize(alive_.sizes);
    problem.ranges = alive_.ranges;
    problem.centroids = centroids_[k];
    problem.sizes = alive_.sizes.data();
    problem.queries = queries_ + unit.first * query_floats();
    problem.tokens = unit.count;
    problem.group = input_.group;
    problem.scale = input_.scale;
    workspace_.resize(std::max(workspace_.size(), static_cast<size_t>(score_workspace(problem))));
    return score_clusters(problem, scores_[k], workspace_);
  }

  // The children of those with score >= threshold become the alive clusters, of level k + 1.
  void descend(int k, float threshold) {
    chosen_.resize(alive_.sizes.size());
    for (size_t i = 0; i < chosen_.size(); ++i) chosen_[i] = scores_[k][i] >= threshold ? 1 : 0;
    alive_ = children_of_chosen(alive_.ranges, chosen_, children_[k].data(), sizes_[k + 1].data(),
                                ranges_[k + 1], alive_sizes_[k + 1]);
  }

  void record(int k, ScoreSketch& sketch) const {
    uint64_t scored = 0;
    for (size_t i = 0; i < alive_.sizes.size(); ++i) {
      sketch.add(scores_[k][i], alive_.sizes[i]);
      scored += alive_.sizes[i];
    }
    sketch.add_dropped(keys_ - scored);
  }

 private:
  int64_t query_floats() const { return input_.group * input_.dim; }

  const CalibrationInput& input_;
  const float* queries_;                         // [n, group, d]
  std::vector<const std::byte*> centroids_;      // per level: [n_k, d]
  std::vector<std::vector<uint32_t>> children_;  // per level: [n_k + 1]
  std::vector<std::vector<uint32_t>> sizes_;     // per level: [n_k] keys
  std::vector<ClusterRange> whole_;              // per level: all of it
  // Room, per level, for what is alive there.
  std::vector<std::vector<ClusterRange>> ranges_;
  std::vector<std::vector<uint32_t>> alive_sizes_;
  std::vector<std::vector<float>> scores_;
  Candidates alive_;
  std::vector<uint8_t> chosen_;
  std::vector<float> workspace_;
  uint64_t keys_ = 0;
};

class CpuScorer final : public CalibrationScorer {
 public:
  CpuScorer(const CalibrationInput& input, int threads)
      : input_(input), threads_(threads), units_(calibration_units(input.calls, input.queries)) {}

  Status run(const CalibrationPass& pass,
             const std::function<void(int64_t, CalibrationSketches&)>& take) override {
    std::mutex mutex;
    const int64_t heads = std::ssize(input_.sparse) * input_.kv_heads;
    return parallel_for(heads, threads_, [&](int64_t index) {
      Head head(input_, input_.sparse[index / input_.kv_heads], index % input_.kv_heads);
      CalibrationSketches sketches;
      for (int scope = 0; scope < Calibration::kScopes; ++scope) {
        for (const CalibrationUnit& unit : units_[scope]) {
          const Status status = measure(head, pass, scope, unit, sketches[scope]);
          if (!status.ok()) return calibration_error(input_, index, status);
        }
      }
      const std::lock_guard lock(mutex);
      take(index, sketches);
      return Status();
    });
  }

 private:
  static Status measure(Head& head, const CalibrationPass& pass, int scope,
                        const CalibrationUnit& unit, ScoreSketch& sketch) {
    const int first = pass.tree() ? 0 : pass.level;
    head.start(first);
    for (int above = first; above < pass.level; ++above) {
      SQZ_RETURN_IF_ERROR(head.score(above, unit));
      head.descend(above, pass.threshold(scope, above));
    }
    SQZ_RETURN_IF_ERROR(head.score(pass.level, unit));
    head.record(pass.level, sketch);
    return Status();
  }

  const CalibrationInput& input_;
  const int threads_;
  const std::array<std::vector<CalibrationUnit>, Calibration::kScopes> units_;
};

}  // namespace

std::vector<std::vector<uint32_t>> calibration_sizes(const CalibrationInput& input,
                                                     const CalibrationLayer& layer, int64_t head) {
  std::vector<std::vector<uint32_t>> sizes;
  for (const std::vector<uint32_t>& first : first_slots(head_children(input, layer, head))) {
    std::vector<uint32_t>& level = sizes.emplace_back(first.size() - 1);
    for (size_t i = 0; i < level.size(); ++i) level[i] = first[i + 1] - first[i];
  }
  return sizes;
}

Status calibration_error(const CalibrationInput& input, int64_t index, const Status& status) {
  return Status(status.code(),
                concat("calibration of layer ", input.sparse[index / input.kv_heads].layer,
                       ", KV head ", index % input.kv_heads, ": ", status.message()));
}

std::unique_ptr<CalibrationScorer> make_cpu_calibration_scorer(const CalibrationInput& input,
                                                               int threads) {
  return std::make_unique<CpuScorer>(input, threads);
}

}  // namespace sqz
