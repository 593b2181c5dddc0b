#include "libindex/cuda/layer_engine.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "libindex/cuda/calibration_scorer.h"
#include "libindex/cuda/kmeans.h"
#include "libindex/cuda/layer/kernels.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

// The device memory of a level of the tree, for a group of heads (G).
struct LevelMemory {
  int32_t clusters = 0, children = 0;             // n_k; n_{k+1}, or M at the finest level
  void* centroids = nullptr;                      // [G, n_k, padded d] bf16; then means of values
  void* means = nullptr;                          // [G, n_k, padded d] bf16; then means of keys
  uint32_t* weights = nullptr;                    // [G, n_k] keys below
  uint32_t *order = nullptr, *offsets = nullptr;  // children by cluster, as k-means numbers them
  uint32_t* file_order = nullptr;     // [G, n_k]: k-means' number of each cluster of the file
  uint32_t* file_offsets = nullptr;   // [G, n_k + 1]
  uint32_t* file_children = nullptr;  // [G, children]: by cluster of the file
  uint32_t* slots = nullptr;          // [G, n_k + 1]
};

struct Memory {
  void* staging = nullptr;  // rows as they came from the host, later rows in slot order
  void *keys = nullptr, *values = nullptr;  // [G, M, d] stored dtype
  void* points = nullptr;                   // [G, M, padded d] bf16; may be `keys`
  void* exact = nullptr;                    // [G, max(sink, tail), d]
  uint32_t* labels = nullptr;               // [G, M]
  float* inverse_norms = nullptr;           // [G, n_k] of the widest level
  uint64_t* seeds = nullptr;                // [G]
  uint64_t* bad = nullptr;                  // [2]: of keys, of values
  uint32_t* faults = nullptr;               // [levels]
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  std::vector<LevelMemory> levels;
  size_t used = 0;
};

int64_t tail_of(const LayerProblem& problem) {
  return problem.tokens - problem.sink - problem.clustered;
}

int64_t exact_of(const LayerProblem& problem) {
  return tail_of(problem) + (problem.clustered == 0 ? 0 : problem.sink);
}

KmeansShape shape_of(const LayerProblem& problem, int64_t heads, size_t level) {
  const auto& clusters = problem.tree.clusters;
  const int64_t points = level + 1 == clusters.size() ? problem.clustered : clusters[level + 1];
  return {static_cast<int32_t>(heads), static_cast<int32_t>(points),
          static_cast<int32_t>(padded_dim(problem.dim)), static_cast<int32_t>(clusters[level])};
}

Result<Memory> lay_out(const LayerProblem& problem, int64_t heads, void* base) {
  const int64_t padded = padded_dim(problem.dim), row = problem.dim * 2;
  const int64_t keys = heads * problem.clustered;
  Memory memory;
  Layout layout(base);
  const int64_t incoming = problem.device == nullptr ? heads * problem.tokens * problem.dim * 4 : 0;
  memory.staging = layout.take<char>(std::max(incoming, keys * row));
  memory.keys = layout.take<char>(keys * row);
  memory.values = layout.take<char>(keys * row);
  const bool as_stored = problem.dtype == DType::kBF16 && padded == problem.dim;
  memory.points = as_stored ? memory.keys : layout.take<char>(keys * padded * 2);
  memory.exact = layout.take<char>(heads * std::max(problem.sink, tail_of(problem)) * row);
  memory.labels = layout.take<uint32_t>(keys);
  memory.seeds = layout.take<uint64_t>(heads);
  memory.bad = layout.take<uint64_t>(2);
  const size_t levels = problem.tree.clusters.size();
  memory.faults = layout.take<uint32_t>(static_cast<int64_t>(levels));
  int64_t widest = 0;
  for (size_t k = 0; k < levels; ++k) {
    const KmeansShape shape = shape_of(problem, heads, k);
    const int64_t n = heads * shape.clusters, children = heads * shape.points;
    LevelMemory level;
    level.clusters = shape.clusters;
    level.children = shape.points;
    level.centroids = layout.take<char>(n * padded * 2);
    level.means = layout.take<char>(n * padded * 2);
    level.weights = layout.take<uint32_t>(n);
    level.order = layout.take<uint32_t>(children);
    level.offsets = layout.take<uint32_t>(n + heads);
    level.file_order = layout.take<uint32_t>(n);
    level.file_offsets = layout.take<uint32_t>(n + heads);
    level.file_children = layout.take<uint32_t>(children);
    level.slots = layout.take<uint32_t>(n + heads);
    memory.levels.push_back(level);
    widest = std::max(widest, n);
    SQZ_ASSIGN_OR_RETURN(const size_t needed, kmeans_workspace(shape));
    memory.workspace_bytes = std::max(memory.workspace_bytes, needed);
  }
  memory.inverse_norms = layout.take<float>(widest);
  memory.workspace = layout.take<char>(static_cast<int64_t>(memory.workspace_bytes));
  memory.used = layout.used();
  return memory;
}

// KV heads that the kernels can number at once.
int64_t most_heads(const LayerProblem& problem) {
  int64_t heads = problem.heads;
  if (problem.clustered > 0) {
    heads = std::min(heads, std::numeric_limits<int32_t>::max() / problem.clustered);
  }
  return std::max<int64_t>(heads, 1);  // one that is too large is lay_out()'s to refuse
}

std::string gigabytes(size_t bytes) {
  return concat(static_cast<double>(bytes / (size_t{1} << 20)) / 1024, " GiB");
}

// KV heads [first, first + heads) of a layer.
class Group {
 public:
  Group(const LayerProblem& problem, Memory memory, int64_t first, int64_t heads,
        cudaStream_t stream, cudaStream_t second_stream, LayerBuffers& buffers)
      : problem_(problem),
        memory_(std::move(memory)),
        first_(first),
        heads_(heads),
        stream_(stream),
        second_stream_(second_stream),
        buffers_(buffers) {}

  Status run() {
    SQZ_RETURN_IF_ERROR(load());
    if (levels() == 0) return {};
    SQZ_RETURN_IF_ERROR(cluster());
    SQZ_RETURN_IF_ERROR(order());
    SQZ_RETURN_IF_ERROR(store());
    return check_faults();
  }

 private:
  const LevelMemory& level(size_t k) const { return memory_.levels[k]; }
  size_t levels() const { return memory_.levels.size(); }
  int32_t heads() const { return static_cast<int32_t>(heads_); }
  int32_t dim() const { return static_cast<int32_t>(problem_.dim); }
  int32_t clustered() const { return static_cast<int32_t>(problem_.clustered); }

  // Where the group's rows [G, N, d] lie on the device: where they came from, or in `staging`.
  PackParams rows_of(bool values) const {
    PackParams pack;
    pack.heads = heads();
    pack.tokens = static_cast<int32_t>(problem_.tokens);
    pack.dim = dim();
    pack.out_type = problem_.dtype;
    pack.out_dim = dim();
    if (problem_.device == nullptr) {
      pack.rows = memory_.staging;
      pack.head_stride = problem_.tokens * problem_.dim;
      return pack;
    }
    const DeviceRows& device = *problem_.device;
    pack.type = device.dtype;
    pack.head_stride = device.head_stride;
    pack.rows = static_cast<const char*>(values ? device.values : device.keys) +
                first_ * device.head_stride * dtype_size(device.dtype);
    return pack;
  }

  Status load_rows(bool values) {
    PackParams pack = rows_of(values);
    if (problem_.device == nullptr) {
      const std::span<const float> host = values ? problem_.values : problem_.keys;
      const int64_t head = problem_.tokens * problem_.dim;
      SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.staging, host.data() + first_ * head,
                                               static_cast<size_t>(heads_ * head) * sizeof(float),
                                               cudaMemcpyHostToDevice, stream_));
    }
    pack.first = static_cast<int32_t>(problem_.sink);
    pack.count = clustered();
    pack.out = values ? memory_.values : memory_.keys;
    pack.bad = memory_.bad + (values ? 1 : 0);
    return pack_rows(pack, stream_);
  }

  Status load() {
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(memory_.bad, 0xFF, 2 * sizeof(uint64_t), stream_));
    SQZ_RETURN_IF_ERROR(load_rows(false));
    if (memory_.points != memory_.keys) {
      PackParams pack = rows_of(false);
      pack.first = static_cast<int32_t>(problem_.sink);
      pack.count = clustered();
      pack.out_type = DType::kBF16;
      pack.out_dim = static_cast<int32_t>(padded_dim(problem_.dim));
      pack.out = memory_.points;
      SQZ_RETURN_IF_ERROR(pack_rows(pack, stream_));
    }
    SQZ_RETURN_IF_ERROR(store_exact(rows_of(false), buffers_.exact_keys));
    SQZ_RETURN_IF_ERROR(load_rows(true));
    SQZ_RETURN_IF_ERROR(store_exact(rows_of(true), buffers_.exact_values));
    return check_bad();
  }

  // Sink, if there are clusters, and tail, straight to the host.
  Status store_exact(PackParams pack, std::vector<std::byte>& out) {
    const int64_t row = problem_.dim * 2, exact = exact_of(problem_), tail = tail_of(problem_);
    const int64_t starts[2] = {0, problem_.tokens - tail};
    const int64_t counts[2] = {exact - tail, tail};
    int64_t place = 0;
    for (int part = 0; part < 2; ++part) {
      if (counts[part] == 0) continue;
      pack.first = static_cast<int32_t>(starts[part]);
      pack.count = static_cast<int32_t>(counts[part]);
      pack.out = memory_.exact;
      SQZ_RETURN_IF_ERROR(pack_rows(pack, stream_));
      const auto width = static_cast<size_t>(counts[part] * row);
      SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(out.data() + (first_ * exact + place) * row,
                                                 static_cast<size_t>(exact * row), memory_.exact,
                                                 width, width, static_cast<size_t>(heads_),
                                                 cudaMemcpyDeviceToHost, stream_));
      place += counts[part];
    }
    return {};
  }

  Status check_bad() {
    uint64_t bad[2];
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(bad, memory_.bad, sizeof(bad), cudaMemcpyDeviceToHost, stream_));
    SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_));
    for (const bool values : {false, true}) {
      const uint64_t place = bad[values ? 1 : 0];
      if (place == std::numeric_limits<uint64_t>::max()) continue;
      const auto at = static_cast<int64_t>(place);
      const int64_t per_head = problem_.tokens * problem_.dim;
      SQZ_ASSIGN_OR_RETURN(const float found, element(values, at / per_head, at % per_head));
      return Status(Code::kNumeric,
                    concat("layer ", problem_.tree.layer, ", KV head ", first_ + at / per_head,
                           ", token ", at % per_head / problem_.dim, ": ", values ? "value" : "key",
                           " element ", at % problem_.dim, " is ", found, ", expected a finite ",
                           dtype_name(problem_.dtype), " number"));
    }
    return {};
  }

  // One element of the input, for the message.
  Result<float> element(bool values, int64_t head, int64_t offset) const {
    if (problem_.device == nullptr) {
      const std::span<const float> host = values ? problem_.values : problem_.keys;
      return host[(first_ + head) * problem_.tokens * problem_.dim + offset];
    }
    const PackParams rows = rows_of(values);
    const DType dtype = problem_.device->dtype;
    const auto size = static_cast<size_t>(dtype_size(dtype));
    uint32_t bits = 0;
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(&bits,
                   static_cast<const char*>(rows.rows) +
                       static_cast<size_t>(head * rows.head_stride + offset) * size,
                   size, cudaMemcpyDeviceToHost));
    if (dtype == DType::kF16) return to_float(Float16{static_cast<uint16_t>(bits)});
    if (dtype == DType::kBF16) bits <<= 16;
    return std::bit_cast<float>(bits);
  }

  Status cluster() {
    for (size_t k = levels(); k-- > 0;) {
      const bool finest = k + 1 == levels();
      const LevelMemory& now = level(k);
      std::vector<uint64_t> seeds;
      for (int64_t h = 0; h < heads_; ++h) {
        seeds.push_back(kmeans_seed(problem_.tree.seed, problem_.tree.layer, first_ + h,
                                    static_cast<int64_t>(levels() - k)));
      }
      SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.seeds, seeds.data(),
                                               seeds.size() * sizeof(uint64_t),
                                               cudaMemcpyHostToDevice, stream_));
      KmeansParams params;
      params.shape = shape_of(problem_, heads_, k);
      params.iterations = problem_.tree.iterations;
      params.seeds = memory_.seeds;
      params.points = finest ? memory_.points : level(k + 1).means;
      params.weights = finest ? nullptr : level(k + 1).weights;
      params.centroids = now.centroids;
      params.labels = memory_.labels;
      params.order = now.order;
      params.offsets = now.offsets;
      params.fault = memory_.faults + k;
      params.workspace = memory_.workspace;
      params.workspace_bytes = memory_.workspace_bytes;
      params.second_stream = finest ? second_stream_ : nullptr;
      SQZ_RETURN_IF_ERROR(kmeans_run(params, stream_));
      SQZ_RETURN_IF_ERROR(cluster_means(
          {params.shape, false, params.points, params.weights, now.order, now.offsets, now.means},
          stream_));
      SQZ_RETURN_IF_ERROR(cluster_weights({heads(), now.children, now.clusters, params.weights,
                                           now.order, now.offsets, now.weights},
                                          stream_));
    }
    return {};
  }

  // From the coarsest level down: which cluster comes where in the file.
  Status order() {
    for (size_t k = 0; k < levels(); ++k) {
      const LevelMemory& now = level(k);
      ChainParams chain;
      chain.heads = heads();
      chain.clusters = now.clusters;
      chain.groups = k == 0 ? 1 : level(k - 1).clusters;
      chain.dim = static_cast<int32_t>(padded_dim(problem_.dim));
      chain.means = now.means;
      chain.list = k == 0 ? nullptr : level(k - 1).file_children;
      chain.groups_at = k == 0 ? nullptr : level(k - 1).file_offsets;
      chain.inverse_norms = memory_.inverse_norms;
      chain.order = now.file_order;
      SQZ_RETURN_IF_ERROR(chain_clusters(chain, stream_));
      SQZ_RETURN_IF_ERROR(
          depth_first_order({heads(), now.children, now.clusters, now.order, now.offsets,
                             now.file_order, now.file_children, now.file_offsets},
                            stream_));
    }
    for (size_t k = levels(); k-- > 0;) {
      const LevelMemory& now = level(k);
      if (k + 1 == levels()) {
        SQZ_RETURN_IF_CUDA_ERROR(
            cudaMemcpyAsync(now.slots, now.file_offsets,
                            static_cast<size_t>(heads_ * (now.clusters + 1)) * sizeof(uint32_t),
                            cudaMemcpyDeviceToDevice, stream_));
      } else {
        SQZ_RETURN_IF_ERROR(compose_slots(
            {heads(), now.clusters, now.children, now.file_offsets, level(k + 1).slots, now.slots},
            stream_));
      }
    }
    return {};
  }

  template <class T>
  Status download(const void* from, std::vector<T>& to, int64_t per_head) {
    return cuda_status(cudaMemcpyAsync(to.data() + first_ * per_head, from,
                                       static_cast<size_t>(heads_ * per_head) * sizeof(T),
                                       cudaMemcpyDeviceToHost, stream_),
                       "cudaMemcpyAsync");
  }

  Status store_rows(const void* rows, std::vector<std::byte>& out) {
    SQZ_RETURN_IF_ERROR(gather_rows(
        {heads(), clustered(), dim(), rows, level(levels() - 1).file_children, memory_.staging},
        stream_));
    return download(memory_.staging, out, problem_.clustered * problem_.dim * 2);
  }

  Status store() {
    const uint32_t* slot_keys = level(levels() - 1).file_children;
    for (size_t k = 0; k < levels(); ++k) {
      const LevelMemory& now = level(k);
      LayerBuffers::Level& out = buffers_.levels[k];
      const int64_t bytes = int64_t{now.clusters} * problem_.dim * 2;
      MeansParams means;
      means.shape = {heads(), clustered(), dim(), now.clusters};
      means.float16 = problem_.dtype == DType::kF16;
      means.order = slot_keys;
      means.offsets = now.slots;
      means.rows = memory_.keys;
      means.means = now.means;
      SQZ_RETURN_IF_ERROR(cluster_means(means, stream_));
      SQZ_RETURN_IF_ERROR(download(now.means, out.centroids, bytes));
      means.rows = memory_.values;
      means.means = now.centroids;
      SQZ_RETURN_IF_ERROR(cluster_means(means, stream_));
      SQZ_RETURN_IF_ERROR(download(now.centroids, out.value_means, bytes));
      SQZ_RETURN_IF_ERROR(download(now.file_offsets, out.offsets, now.clusters + 1));
    }
    SQZ_RETURN_IF_ERROR(download(slot_keys, buffers_.positions, problem_.clustered));
    SQZ_RETURN_IF_ERROR(store_rows(memory_.keys, buffers_.keys));
    SQZ_RETURN_IF_ERROR(store_rows(memory_.values, buffers_.values));
    SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_));
    const auto begin = buffers_.positions.begin() + first_ * problem_.clustered;
    std::transform(begin, begin + heads_ * problem_.clustered, begin,
                   [&](uint32_t key) { return key + static_cast<uint32_t>(problem_.sink); });
    return {};
  }

  Status check_faults() {
    std::vector<uint32_t> faults(levels());
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(faults.data(), memory_.faults,
                                        faults.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost));
    if (std::all_of(faults.begin(), faults.end(), [](uint32_t fault) { return fault == 0; })) {
      return {};
    }
    return {Code::kNumeric, concat("layer ", problem_.tree.layer,
                                   ": a key is longer than 1e18, which engine cuda cannot cluster; "
                                   "choose --engine faiss")};
  }

  const LayerProblem& problem_;
  const Memory memory_;
  const int64_t first_, heads_;
  const cudaStream_t stream_, second_stream_;
  LayerBuffers& buffers_;
};

}  // namespace

int64_t padded_dim(int64_t dim) {
  for (const int64_t kernel : {32, 64, 96, 128, 256}) {
    if (dim <= kernel) return kernel;
  }
  return 0;
}

Status CudaLayerEngine::prepare() {
  if (stream_.get() != nullptr) return {};
  SQZ_RETURN_IF_ERROR(second_stream_.create());
  return stream_.create();
}

Result<LayerMemory> CudaLayerEngine::memory(const LayerProblem& problem) const {
  SQZ_ASSIGN_OR_RETURN(const Memory whole, lay_out(problem, most_heads(problem), nullptr));
  SQZ_ASSIGN_OR_RETURN(const Memory least, lay_out(problem, 1, nullptr));
  return LayerMemory{whole.used, least.used};
}

Result<int64_t> CudaLayerEngine::group_size(const LayerProblem& problem) {
  SQZ_ASSIGN_OR_RETURN(size_t available, memory_.available());
  available = std::min(available, limit_);
  int64_t heads = most_heads(problem);
  size_t needed = 0;
  for (; heads > 0; --heads) {
    SQZ_ASSIGN_OR_RETURN(const Memory memory, lay_out(problem, heads, nullptr));
    needed = memory.used;
    if (needed <= available) break;
  }
  if (heads == 0) {
    return Status(Code::kOutOfMemory,
                  concat("layer ", problem.tree.layer, ": engine cuda needs ", gigabytes(needed),
                         " of GPU memory for one KV head of ", problem.tokens, " tokens, ",
                         gigabytes(available),
                         " are free; free some, index fewer tokens, or choose --engine faiss"));
  }
  SQZ_RETURN_IF_ERROR(memory_.reserve(needed));
  return heads;
}

std::unique_ptr<CalibrationScorer> CudaLayerEngine::calibration_scorer(
    const CalibrationInput& input) {
  return make_calibration_scorer(input, gpu_, memory_);
}

Status CudaLayerEngine::fill(const LayerProblem& problem,
                             const std::function<void(int64_t, int64_t)>& progress,
                             LayerBuffers& buffers) {
  const CurrentDevice current(gpu_);
  SQZ_RETURN_IF_ERROR(prepare());
  buffers.resize(problem.heads, problem.dim, problem.tree.clusters, problem.clustered,
                 exact_of(problem));
  SQZ_ASSIGN_OR_RETURN(const int64_t group, group_size(problem));
  for (int64_t first = 0; first < problem.heads; first += group) {
    const int64_t heads = std::min(group, problem.heads - first);
    SQZ_ASSIGN_OR_RETURN(Memory memory, lay_out(problem, heads, memory_.data()));
    SQZ_RETURN_IF_ERROR(Group(problem, std::move(memory), first, heads, stream_.get(),
                              second_stream_.get(), buffers)
                            .run());
    if (progress) progress(first + heads, problem.heads);
  }
  return {};
}

}  // namespace sqz::cuda
