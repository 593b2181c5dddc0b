// `upload`: an index from the page cache to a GPU, beside a copy from pinned memory, which is the
// machine's limit, and copies from the mapped file, which is what the ring of pinned buffers saves.
#include <algorithm>
#include <chrono>

#include "formats/base/parallel.h"
#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/device_index.h"
#include "tools/sqz_bench/device_bench.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::CurrentDevice;

constexpr int64_t kPiece = int64_t{64} << 20;
constexpr size_t kPinnedBytes = size_t{1} << 30;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Work {
  SparseIndex made;  // first: it outlives the mapping
  std::shared_ptr<const ServedIndex> served;
  int gpu = 0, threads = 0;
  uint64_t bytes = 0;               // that an upload copies
  double last = 0;                  // seconds of the last upload
  std::vector<double> first_layer;  // of all uploads
  cuda::DeviceMemory memory;        // of the copies beside
  void* pinned = nullptr;
  ~Work() { cudaFreeHost(pinned); }

  Status upload();
};

// What an upload costs does not depend on what is copied.
Fill fill_with(int threads) {
  std::vector<std::byte> pattern(static_cast<size_t>(kPiece));
  for (size_t i = 0; i < pattern.size(); ++i) {
    pattern[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  }
  return [threads, pattern](WriteFile& file, uint64_t begin, uint64_t end) {
    const auto pieces = static_cast<int64_t>((end - begin + kPiece - 1) / kPiece);
    return parallel_for(pieces, threads, [&](int64_t i) {
      const uint64_t at = begin + static_cast<uint64_t>(i * kPiece);
      return file.write(at, std::span(pattern).first(std::min<uint64_t>(kPiece, end - at)));
    });
  };
}

// As make_served_index() has it, without the sizes of clusters: there are none in such a file.
std::shared_ptr<const ServedIndex> served_index(std::shared_ptr<const SqzFile> file) {
  auto served = std::make_shared<ServedIndex>();
  served->file = std::move(file);
  const ModelDescription& model = served->metadata().model;
  for (int64_t l = 0; l < model.layers; ++l) {
    served->layers.push_back(served->file->layer(l));
    LayerTable table;
    for (int k = 0; k < served->layers.back().levels; ++k) {
      const auto heads = static_cast<size_t>(model.kv_heads);
      const size_t count = heads * static_cast<size_t>(served->layers.back().level[k].clusters);
      table.level[k] = {.offsets = std::vector<uint32_t>(count + heads),
                        .sizes = std::vector<uint32_t>(count),
                        .log_sizes = std::vector<float>(count)};
    }
    served->tables.push_back(std::move(table));
  }
  return served;
}

// Allocation included, freeing not.
Status Work::upload() {
  const auto start = Clock::now();
  cuda::UploadOptions options;
  options.device = gpu;
  options.threads = threads;
  options.wait = false;
  SQZ_ASSIGN_OR_RETURN(const auto index, cuda::upload_index(served, options));
  SQZ_RETURN_IF_ERROR(index->wait(0));
  first_layer.push_back(seconds_since(start));
  SQZ_RETURN_IF_ERROR(index->wait(std::ssize(served->layers) - 1));
  last = seconds_since(start);
  bytes = index->bytes();
  return {};
}

Contender uploads(const std::shared_ptr<Work>& work) {
  const auto details = [work] {
    auto& seconds = work->first_layer;
    std::sort(seconds.begin(), seconds.end());
    return JsonMembers{{"bytes_read", work->bytes},
                       {"first_layer_seconds", seconds[seconds.size() / 2]}};
  };
  return {.name = "upload",
          .run = [work](int64_t) { return work->upload(); },
          .details = details,
          .seconds = [work] { return work->last; }};
}

// One copy of `bytes` from `host`, which stands for the upload's.
Contender copies(const std::shared_ptr<Work>& work, const char* name, const void* host,
                 size_t bytes) {
  const auto run = [work, host, bytes](int64_t) {
    const CurrentDevice current(work->gpu);
    return cuda::cuda_status(cudaMemcpy(work->memory.data(), host, bytes, cudaMemcpyHostToDevice),
                             "a copy");
  };
  return {.name = name,
          .run = run,
          .bytes = static_cast<double>(bytes),
          .part = static_cast<double>(bytes) / static_cast<double>(work->bytes)};
}

}  // namespace

Result<CaseSetup> upload_device_case(const Options& options) {
  const auto work = std::make_shared<Work>();
  work->gpu = options.gpu;
  work->threads = options.upload_threads;
  const double gib = options.file_gib_or(16);
  SQZ_ASSIGN_OR_RETURN(work->made, make_sparse_index(options, gib * 0x1p30, options.file_layers,
                                                     fill_with(options.threads)));
  SQZ_ASSIGN_OR_RETURN(auto file, SqzFile::open(work->made.file->path()));
  work->served = served_index(std::move(file));
  const CurrentDevice current(work->gpu);
  SQZ_RETURN_IF_ERROR(work->upload());  // once, to know its bytes
  const LayerView& layer = work->served->layers[0];
  const auto mapped =
      static_cast<size_t>(2 * layer.kv_heads * layer.slots * layer.head_dim);  // its keys
  SQZ_RETURN_IF_ERROR(work->memory.reserve(std::max(mapped, kPinnedBytes)));
  SQZ_RETURN_IF_CUDA_ERROR(cudaMallocHost(&work->pinned, kPinnedBytes));
  CaseSetup setup;
  const cuda::DeviceProbe probe = cuda::probe_device(options.gpu);
  setup.shape = {{"file_bytes", work->served->file->file_bytes()},
                 {"layers", options.file_layers},
                 {"upload_threads", options.upload_threads},
                 {"gpu", probe.name},
                 {"cuda_driver", probe.driver_version}};
  setup.rounds = options.repeat_or(5);
  setup.contenders = {uploads(work), copies(work, "pinned copy", work->pinned, kPinnedBytes),
                      copies(work, "mapped copy", layer.keys, mapped)};
  setup.baselines = {"upload", "pinned copy"};
  return setup;
}

}  // namespace sqz::bench
