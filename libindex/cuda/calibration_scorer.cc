#include "libindex/cuda/calibration_scorer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "libindex/cuda/calibrate/kernels.h"
#include "libindex/score_bins.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int kScopes = Calibration::kScopes;

struct ScorerLevel {
  int32_t clusters = 0, children = 0;
  void* centroids = nullptr;    // [G, n_k, d]
  uint32_t* offsets = nullptr;  // [G, n_k + 1]
  uint32_t* sizes = nullptr;    // [G, n_k]
  uint8_t* alive = nullptr;     // [G, U, n_k]
  float* logits = nullptr;      // [G, R, n_k]
};

// On the device, for a group of KV heads (G).
struct ScorerMemory {
  std::vector<ScorerLevel> levels;  // the first `first` ones are left out
  float* queries = nullptr;         // [G, R, d]
  float* lse = nullptr;             // [G, R]
  float* scores = nullptr;          // [G, U, widest n_k]
  int2* unit_rows[kScopes] = {};
  int32_t* row_units[kScopes] = {};
  unsigned long long* counts = nullptr;  // [kScopes, G, kScoreBins]
  uint32_t* faults = nullptr;            // [G]
  size_t used = 0;
};

class CudaScorer final : public CalibrationScorer {
 public:
  CudaScorer(const CalibrationInput& input, int gpu, DeviceMemory& memory)
      : input_(input),
        gpu_(gpu),
        device_(memory),
        units_(calibration_units(input.calls, input.queries)),
        rows_(input.queries * input.group) {}

  Status run(const CalibrationPass& pass,
             const std::function<void(int64_t, CalibrationSketches&)>& take) override {
    const CurrentDevice current(gpu_);
    if (stream_.get() == nullptr) SQZ_RETURN_IF_ERROR(stream_.create());
    SQZ_ASSIGN_OR_RETURN(const int64_t group, group_size(pass));
    for (int64_t layer = 0; layer < std::ssize(input_.sparse); ++layer) {
      for (int64_t first = 0; first < input_.kv_heads; first += group) {
        const int64_t heads = std::min(group, input_.kv_heads - first);
        const ScorerMemory memory = lay_out(pass, heads, device_.data());
        SQZ_RETURN_IF_ERROR(upload(pass, memory, layer, first, heads));
        SQZ_RETURN_IF_ERROR(measure(pass, memory, heads));
        SQZ_RETURN_IF_ERROR(download(memory, layer * input_.kv_heads + first, heads, take));
      }
    }
    return {};
  }

 private:
  static int first_level(const CalibrationPass& pass) { return pass.tree() ? 0 : pass.level; }

  ScorerMemory lay_out(const CalibrationPass& pass, int64_t heads, void* base) const {
    ScorerMemory memory;
    Layout layout(base);
    int64_t units = 0, widest = 0;
    for (const auto& scope : units_) units = std::max(units, std::ssize(scope));
    memory.levels.resize(static_cast<size_t>(pass.level) + 1);
    for (int k = first_level(pass); k <= pass.level; ++k) {
      const auto& children = input_.sparse[0].levels[static_cast<size_t>(k)].children;
      ScorerLevel& level = memory.levels[static_cast<size_t>(k)];
      const int64_t clusters = std::ssize(children) / input_.kv_heads - 1;
      level.clusters = static_cast<int32_t>(clusters);
      level.children = static_cast<int32_t>(children.back());
      level.centroids = layout.take<uint16_t>(heads * clusters * input_.dim);
      level.offsets = layout.take<uint32_t>(heads * (clusters + 1));
      level.sizes = layout.take<uint32_t>(heads * clusters);
      level.alive = layout.take<uint8_t>(k > 0 ? heads * units * clusters : 0);
      level.logits = layout.take<float>(heads * rows_ * clusters);
      widest = std::max(widest, clusters);
    }
    memory.queries = layout.take<float>(heads * rows_ * input_.dim);
    memory.lse = layout.take<float>(heads * rows_);
    memory.scores = layout.take<float>(heads * units * widest);
    for (int scope = 0; scope < kScopes; ++scope) {
      memory.unit_rows[scope] = layout.take<int2>(units);
      memory.row_units[scope] = layout.take<int32_t>(rows_);
    }
    memory.counts = layout.take<unsigned long long>(kScopes * heads * kScoreBins);
    memory.faults = layout.take<uint32_t>(heads);
    memory.used = layout.used();
    return memory;
  }

  // As many KV heads of a layer as fit; all layers have the same shape.
  Result<int64_t> group_size(const CalibrationPass& pass) {
    SQZ_ASSIGN_OR_RETURN(const size_t available, device_.available());
    size_t needed = 0;
    for (int64_t heads = std::min<int64_t>(input_.kv_heads, 65535); heads > 0; --heads) {
      needed = lay_out(pass, heads, nullptr).used;
      if (needed > available) continue;
      SQZ_RETURN_IF_ERROR(device_.reserve(needed));
      return heads;
    }
    return Status(
        Code::kOutOfMemory,
        concat("calibration needs ", needed >> 20, " MiB of GPU memory for one KV head, ",
               available >> 20, " are free; free some, lower --tail, or choose --engine faiss"));
  }

  template <class T>
  Status copy(const T* from, void* to, int64_t count) {
    return cuda_status(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T),
                                       cudaMemcpyHostToDevice, stream_.get()),
                       "cudaMemcpyAsync");
  }

  Status upload(const CalibrationPass& pass, const ScorerMemory& memory, int64_t layer,
                int64_t first, int64_t heads) {
    const CalibrationLayer& data = input_.sparse[static_cast<size_t>(layer)];
    const int64_t queries = rows_ * input_.dim;
    SQZ_RETURN_IF_ERROR(
        copy(data.queries.data() + first * queries, memory.queries, heads * queries));
    std::vector<std::vector<uint32_t>> sizes(memory.levels.size());
    for (int64_t h = 0; h < heads; ++h) {
      const auto of_head = calibration_sizes(input_, data, first + h);
      for (size_t k = 0; k < sizes.size(); ++k) {
        sizes[k].insert(sizes[k].end(), of_head[k].begin(), of_head[k].end());
      }
    }
    for (auto k = static_cast<size_t>(first_level(pass)); k < memory.levels.size(); ++k) {
      const ScorerLevel& level = memory.levels[k];
      const int64_t bytes = level.clusters * input_.dim * dtype_size(input_.dtype);
      SQZ_RETURN_IF_ERROR(
          copy(data.levels[k].centroids.data() + first * bytes, level.centroids, heads * bytes));
      SQZ_RETURN_IF_ERROR(copy(data.levels[k].children.data() + first * (level.clusters + 1),
                               level.offsets, heads * (level.clusters + 1)));
      SQZ_RETURN_IF_ERROR(copy(sizes[k].data(), level.sizes, heads * level.clusters));
    }
    for (int scope = 0; scope < kScopes; ++scope) {
      SQZ_RETURN_IF_ERROR(upload_units(memory, scope));
    }
    const auto counts = static_cast<size_t>(kScopes * heads * kScoreBins);
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(memory.counts, 0, counts * sizeof(uint64_t), stream_.get()));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(
        memory.faults, 0, static_cast<size_t>(heads) * sizeof(uint32_t), stream_.get()));
    return cuda_status(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  }

  Status upload_units(const ScorerMemory& memory, int scope) {
    std::vector<int2> unit_rows;
    std::vector<int32_t> row_units(static_cast<size_t>(rows_), -1);
    for (const CalibrationUnit& unit : units_[static_cast<size_t>(scope)]) {
      const int64_t first = unit.first * input_.group, count = unit.count * input_.group;
      std::fill_n(row_units.begin() + first, count, static_cast<int32_t>(unit_rows.size()));
      unit_rows.push_back({static_cast<int>(first), static_cast<int>(count)});
    }
    SQZ_RETURN_IF_ERROR(copy(unit_rows.data(), memory.unit_rows[scope], std::ssize(unit_rows)));
    SQZ_RETURN_IF_ERROR(copy(row_units.data(), memory.row_units[scope], rows_));
    return cuda_status(cudaStreamSynchronize(stream_.get()),
                       "cudaStreamSynchronize");  // they end here
  }

  UnitScores scores_of(const ScorerMemory& memory, const ScorerLevel& level, int scope,
                       int64_t heads, bool only_alive) const {
    UnitScores out;
    out.heads = static_cast<int32_t>(heads);
    out.rows = static_cast<int32_t>(rows_);
    out.units = static_cast<int32_t>(units_[static_cast<size_t>(scope)].size());
    out.clusters = level.clusters;
    out.unit_rows = memory.unit_rows[scope];
    out.row_units = memory.row_units[scope];
    out.sizes = level.sizes;
    out.alive = only_alive ? level.alive : nullptr;
    out.logits = level.logits;
    out.lse = memory.lse;
    out.scores = memory.scores;
    out.faults = memory.faults;
    return out;
  }

  Status measure(const CalibrationPass& pass, const ScorerMemory& memory, int64_t heads) {
    for (int k = first_level(pass); k <= pass.level; ++k) {
      const ScorerLevel& level = memory.levels[static_cast<size_t>(k)];
      LogitParams logits;
      logits.heads = static_cast<int32_t>(heads);
      logits.rows = static_cast<int32_t>(rows_);
      logits.clusters = level.clusters;
      logits.dim = static_cast<int32_t>(input_.dim);
      logits.scale = input_.scale;
      logits.float16 = input_.dtype == DType::kF16;
      logits.queries = memory.queries;
      logits.centroids = level.centroids;
      logits.logits = level.logits;
      SQZ_RETURN_IF_ERROR(calibration_logits(logits, stream_.get()));
    }
    for (int scope = 0; scope < kScopes; ++scope) {
      SQZ_RETURN_IF_ERROR(measure_scope(pass, memory, heads, scope));
    }
    return {};
  }

  // Level by level down to the one that is recorded.
  Status measure_scope(const CalibrationPass& pass, const ScorerMemory& memory, int64_t heads,
                       int scope) {
    const int first = first_level(pass);
    for (int k = first;; ++k) {
      const ScorerLevel& level = memory.levels[static_cast<size_t>(k)];
      const UnitScores scores = scores_of(memory, level, scope, heads, k > first);
      SQZ_RETURN_IF_ERROR(calibration_lse(scores, stream_.get()));
      SQZ_RETURN_IF_ERROR(calibration_scores(scores, stream_.get()));
      if (k == pass.level) {
        unsigned long long* counts = memory.counts + scope * heads * kScoreBins;
        return calibration_record(scores, counts, stream_.get());
      }
      DescendParams descend;
      descend.heads = scores.heads;
      descend.units = scores.units;
      descend.clusters = level.clusters;
      descend.children = level.children;
      descend.threshold = pass.threshold(scope, k);
      descend.scores = memory.scores;
      descend.offsets = level.offsets;
      descend.next = memory.levels[static_cast<size_t>(k) + 1].alive;
      SQZ_RETURN_IF_ERROR(calibration_descend(descend, stream_.get()));
    }
  }

  Status download(const ScorerMemory& memory, int64_t first, int64_t heads,
                  const std::function<void(int64_t, CalibrationSketches&)>& take) {
    std::vector<uint64_t> counts(static_cast<size_t>(kScopes * heads * kScoreBins));
    std::vector<uint32_t> faults(static_cast<size_t>(heads));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(counts.data(), memory.counts,
                                             counts.size() * sizeof(uint64_t),
                                             cudaMemcpyDeviceToHost, stream_.get()));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(faults.data(), memory.faults,
                                             faults.size() * sizeof(uint32_t),
                                             cudaMemcpyDeviceToHost, stream_.get()));
    SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.get()));
    for (int64_t h = 0; h < heads; ++h) {
      if (faults[static_cast<size_t>(h)] != 0) {
        return calibration_error(
            input_, first + h,
            Status(Code::kNumeric, "the product of a query and a centroid is NaN or infinite"));
      }
      CalibrationSketches sketches;
      for (int scope = 0; scope < kScopes; ++scope) {
        const int64_t at = (scope * heads + h) * kScoreBins;
        const std::span<const uint64_t> bins(counts.data() + at, kScoreBins);
        sketches[scope].add_bins(bins, dropped(bins, scope, first + h));
      }
      take(first + h, sketches);
    }
    return {};
  }

  // Keys that the levels above let through in none of the units.
  uint64_t dropped(std::span<const uint64_t> bins, int scope, int64_t index) const {
    const CalibrationLayer& layer = input_.sparse[static_cast<size_t>(index / input_.kv_heads)];
    uint64_t total =
        layer.levels.back().children.back() * units_[static_cast<size_t>(scope)].size();
    for (const uint64_t keys : bins) total -= keys;
    return total;
  }

  const CalibrationInput& input_;
  const int gpu_;
  DeviceMemory& device_;
  const std::array<std::vector<CalibrationUnit>, kScopes> units_;
  const int64_t rows_;  // query rows of a KV head
  Stream stream_;
};

}  // namespace

std::unique_ptr<CalibrationScorer> make_calibration_scorer(const CalibrationInput& input, int gpu,
                                                           DeviceMemory& memory) {
  return std::make_unique<CudaScorer>(input, gpu, memory);
}

}  // namespace sqz::cuda
