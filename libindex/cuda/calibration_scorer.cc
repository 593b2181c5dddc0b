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
  int64_t clusters = 0;
  std::byte* centroids = nullptr;  // [G, n_k, dim]
  uint32_t* offsets = nullptr;     // [G, n_k + 1]
  uint32_t* sizes = nullptr;       // [G, n_k]
  RunLists chosen;                 // [U, G]
};

// On the device, for a group of KV heads (G). Rows are filled up with zeros to `dim`, a head
// dimension that serving has kernels for.
struct ScorerMemory {
  std::vector<ScorerLevel> levels;       // the first `first` ones are left out
  float* queries = nullptr;              // [n, G, group, dim]
  int2* units[kScopes] = {};             // [U] first token, tokens
  unsigned long long* counts = nullptr;  // [kScopes, G, kScoreBins]
  uint32_t* faults = nullptr;            // [G]
  std::byte* workspace = nullptr;
  int64_t workspace_bytes = 0;
  size_t used = 0;
};

int64_t served_dim(int64_t dim) {
  for (const int64_t served : {64, 96, 128}) {
    if (dim <= served) return served;
  }
  return 256;
}

class CudaScorer final : public CalibrationScorer {
 public:
  CudaScorer(const CalibrationInput& input, int gpu, DeviceMemory& memory)
      : input_(input),
        gpu_(gpu),
        device_(memory),
        units_(calibration_units(input.calls, input.queries)),
        dim_(served_dim(input.dim)) {}

  Status run(const CalibrationPass& pass,
             const std::function<void(int64_t, CalibrationSketches&)>& take) override {
    const CurrentDevice current(gpu_);
    if (stream_.get() == nullptr) SQZ_RETURN_IF_ERROR(stream_.create());
    SQZ_ASSIGN_OR_RETURN(gpu_kind_, read_device(gpu_));
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

  PrefillShape shape_of(int64_t heads) const {
    return {input_.dtype, static_cast<int32_t>(dim_), static_cast<int32_t>(heads),
            static_cast<int32_t>(input_.group), input_.scale};
  }
  QueryBlocks blocks_of(int scope, const int2* table) const {
    int64_t most = 1;
    const auto& units = units_[static_cast<size_t>(scope)];
    for (const CalibrationUnit& unit : units) most = std::max<int64_t>(most, unit.count);
    return {static_cast<int32_t>(input_.queries), static_cast<int32_t>(units.size()),
            static_cast<int32_t>(most), table};
  }

  ScorerMemory lay_out(const CalibrationPass& pass, int64_t heads, void* base) const {
    ScorerMemory memory;
    Layout layout(base);
    int64_t units = 0;
    for (const auto& scope : units_) units = std::max(units, std::ssize(scope));
    memory.levels.resize(static_cast<size_t>(pass.level) + 1);
    for (int k = first_level(pass); k <= pass.level; ++k) {
      const auto& children = input_.sparse[0].levels[static_cast<size_t>(k)].children;
      ScorerLevel& level = memory.levels[static_cast<size_t>(k)];
      level.clusters = std::ssize(children) / input_.kv_heads - 1;
      level.centroids = layout.take<std::byte>(heads * level.clusters * dim_ * 2);
      level.offsets = layout.take<uint32_t>(heads * (level.clusters + 1));
      level.sizes = layout.take<uint32_t>(heads * level.clusters);
      level.chosen.capacity = (level.clusters + 1) / 2;
      level.chosen.lay_out(layout, heads * units);
      for (int scope = 0; scope < kScopes; ++scope) {
        memory.workspace_bytes =
            std::max(memory.workspace_bytes,
                     prefill_lookup_workspace(shape_of(heads), blocks_of(scope, nullptr),
                                              static_cast<int32_t>(level.clusters), false));
      }
    }
    memory.queries = layout.take<float>(heads * input_.queries * input_.group * dim_);
    for (int2*& of_scope : memory.units) of_scope = layout.take<int2>(units);
    memory.counts = layout.take<unsigned long long>(kScopes * heads * kScoreBins);
    memory.faults = layout.take<uint32_t>(heads);
    memory.workspace = layout.take<std::byte>(memory.workspace_bytes);
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

  // Rows of input_.dim numbers of `bytes` each into rows of dim_, `stride` of these apart.
  Status copy_rows(const void* from, void* to, int64_t count, int64_t rows, int64_t stride,
                   int64_t bytes) {
    const auto pitch = static_cast<size_t>(input_.dim * bytes);
    for (int64_t i = 0; i < count; ++i) {
      SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(
          static_cast<std::byte*>(to) + i * stride * dim_ * bytes,
          static_cast<size_t>(dim_ * bytes),
          static_cast<const std::byte*>(from) + i * rows * input_.dim * bytes, pitch, pitch,
          static_cast<size_t>(rows), cudaMemcpyHostToDevice, stream_.get()));
    }
    return {};
  }

  Status upload(const CalibrationPass& pass, const ScorerMemory& memory, int64_t layer,
                int64_t first, int64_t heads) {
    const CalibrationLayer& data = input_.sparse[static_cast<size_t>(layer)];
    // Rows that are filled up, lists that are not written yet, and counts.
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(device_.data(), 0, memory.used, stream_.get()));
    // By KV head and token, to by token and KV head.
    const int64_t group = input_.group, of_head = input_.queries * group * input_.dim;
    for (int64_t h = 0; h < heads; ++h) {
      SQZ_RETURN_IF_ERROR(copy_rows(data.queries.data() + (first + h) * of_head,
                                    memory.queries + h * group * dim_, input_.queries, group,
                                    heads * group, sizeof(float)));
    }
    std::vector<std::vector<uint32_t>> sizes(memory.levels.size());
    for (int64_t h = 0; h < heads; ++h) {
      const auto own = calibration_sizes(input_, data, first + h);
      for (size_t k = 0; k < sizes.size(); ++k) {
        sizes[k].insert(sizes[k].end(), own[k].begin(), own[k].end());
      }
    }
    for (auto k = static_cast<size_t>(first_level(pass)); k < memory.levels.size(); ++k) {
      const ScorerLevel& level = memory.levels[k];
      const int64_t rows = heads * level.clusters;
      SQZ_RETURN_IF_ERROR(
          copy_rows(data.levels[k].centroids.data() + first * level.clusters * input_.dim * 2,
                    level.centroids, 1, rows, rows, 2));
      SQZ_RETURN_IF_ERROR(copy(data.levels[k].children.data() + first * (level.clusters + 1),
                               level.offsets, heads * (level.clusters + 1)));
      SQZ_RETURN_IF_ERROR(copy(sizes[k].data(), level.sizes, heads * level.clusters));
    }
    std::vector<int2> units[kScopes];
    for (int scope = 0; scope < kScopes; ++scope) {
      for (const CalibrationUnit& unit : units_[static_cast<size_t>(scope)]) {
        units[scope].push_back({static_cast<int>(unit.first), static_cast<int>(unit.count)});
      }
      SQZ_RETURN_IF_ERROR(copy(units[scope].data(), memory.units[scope], std::ssize(units[scope])));
    }
    return cuda_status(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  }

  // By the lookup that serves prompts, level by level down to the one that is recorded.
  Status measure(const CalibrationPass& pass, const ScorerMemory& memory, int64_t heads) {
    for (int scope = 0; scope < kScopes; ++scope) {
      PrefillLookup lookup;
      lookup.shape = shape_of(heads);
      lookup.blocks = blocks_of(scope, memory.units[scope]);
      lookup.queries = memory.queries;
      lookup.q_dtype = DType::kF32;
      if (lookup.blocks.count == 0) continue;
      for (int k = first_level(pass); k <= pass.level; ++k) {
        const ScorerLevel& level = memory.levels[static_cast<size_t>(k)];
        lookup.level.centroids = level.centroids;
        lookup.level.offsets = level.offsets;
        lookup.level.sizes = level.sizes;
        lookup.level.clusters = static_cast<int32_t>(level.clusters);
        lookup.alive = lookup.chosen;  // of the level above; at the first one all
        lookup.chosen = level.chosen;
        SelectRuns scored;
        SQZ_RETURN_IF_ERROR(prefill_scores(lookup, memory.workspace, memory.workspace_bytes,
                                           gpu_kind_, false, stream_.get(), scored));
        if (k == pass.level) {
          unsigned long long* counts = memory.counts + scope * heads * kScoreBins;
          SQZ_RETURN_IF_ERROR(calibration_record(scored, counts, memory.faults, stream_.get()));
          break;
        }
        for (float& threshold : scored.level.log_threshold) threshold = pass.threshold(scope, k);
        SQZ_RETURN_IF_ERROR(launch_select(scored, gpu_kind_, stream_.get()));
      }
    }
    return {};
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
  const int64_t dim_;  // of the rows on the GPU
  Device gpu_kind_;
  Stream stream_;
};

}  // namespace

std::unique_ptr<CalibrationScorer> make_calibration_scorer(const CalibrationInput& input, int gpu,
                                                           DeviceMemory& memory) {
  return std::make_unique<CudaScorer>(input, gpu, memory);
}

}  // namespace sqz::cuda
