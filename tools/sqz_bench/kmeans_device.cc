#include "tools/sqz_bench/kmeans_device.h"

#include <memory>
#include <numeric>
#include <utility>

#include "libindex/cuda/kmeans.h"
#include "libindex/kmeans.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "tools/sqz_bench/device_graph.h"
#include "tools/sqz_bench/gpu_clock.h"

namespace sqz::bench {
namespace {

using cuda::CurrentDevice;
using cuda::KmeansParams;

constexpr int kIterations = 10;

struct Work {
  int gpu = 0;
  cuda::DeviceMemory memory;
  cuda::Stream stream, second_stream;
  KmeansParams params;
  DeviceGraph graphs[3];
  std::unique_ptr<GpuClock> clock;
  std::vector<float> faiss_points;
  std::vector<int32_t> faiss_labels;
};

KmeansParams lay_out(const KmeansPoints& points, size_t workspace, cuda::Layout& layout) {
  const int64_t rows = points.heads * points.points, clusters = points.heads * points.clusters;
  KmeansParams params;
  params.shape = {static_cast<int32_t>(points.heads), static_cast<int32_t>(points.points),
                  static_cast<int32_t>(points.dim), static_cast<int32_t>(points.clusters)};
  params.points = layout.take<BFloat16>(rows * points.dim);
  params.centroids = layout.take<BFloat16>(clusters * points.dim);
  params.labels = layout.take<uint32_t>(rows);
  params.order = layout.take<uint32_t>(rows);
  params.offsets = layout.take<uint32_t>(clusters + points.heads);
  params.cosines = layout.take<float>(rows);
  params.fault = layout.take<uint32_t>(1);
  params.workspace = layout.take<char>(static_cast<int64_t>(workspace));
  params.workspace_bytes = workspace;
  return params;
}

Status prepare(Work& work, const KmeansPoints& points) {
  const CurrentDevice current(work.gpu);
  cuda::Layout sizes(nullptr);
  SQZ_ASSIGN_OR_RETURN(const size_t workspace,
                       cuda::kmeans_workspace(lay_out(points, 0, sizes).shape));
  cuda::Layout needed(nullptr);
  lay_out(points, workspace, needed);
  SQZ_ASSIGN_OR_RETURN(const size_t available, work.memory.available());
  if (needed.used() > available) {
    return Status(Code::kOutOfMemory,
                  concat("kmeans: needs ", needed.used() >> 20, " MiB of GPU memory, ",
                         available >> 20, " are free; lower --kmeans-heads or --tokens"));
  }
  SQZ_RETURN_IF_ERROR(work.memory.reserve(needed.used()));
  cuda::Layout layout(work.memory.data());
  work.params = lay_out(points, workspace, layout);
  const size_t head_bytes = points.rows.front().size() * sizeof(BFloat16);
  for (int64_t head = 0; head < points.heads; ++head) {
    const auto& row = points.rows[static_cast<size_t>(head) % points.rows.size()];
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(static_cast<char*>(const_cast<void*>(work.params.points)) +
                                            static_cast<size_t>(head) * head_bytes,
                                        row.data(), head_bytes, cudaMemcpyHostToDevice));
  }
  SQZ_RETURN_IF_ERROR(work.stream.create());
  SQZ_RETURN_IF_ERROR(work.second_stream.create());
  char bus_id[64] = "";
  SQZ_RETURN_IF_CUDA_ERROR(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), work.gpu));
  work.clock = std::make_unique<GpuClock>(bus_id);
  return {};
}

Result<double> mean_cosine(const Work& work, DeviceGraph& graph) {
  SQZ_RETURN_IF_ERROR(graph.run(work.stream.get()));
  const auto rows =
      static_cast<size_t>(work.params.shape.heads) * static_cast<size_t>(work.params.shape.points);
  std::vector<float> cosines(rows);
  SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(cosines.data(), work.params.cosines, rows * sizeof(float),
                                      cudaMemcpyDeviceToHost));
  return std::accumulate(cosines.begin(), cosines.end(), 0.0) / static_cast<double>(rows);
}

// Our loop with `iterations` updates, and one assignment more.
Result<Contender> ours(const std::shared_ptr<Work>& work, int place, const char* name,
                       int iterations, bool two_streams) {
  KmeansParams params = work->params;
  params.iterations = iterations;
  params.second_stream = two_streams ? work->second_stream.get() : nullptr;
  DeviceGraph& graph = work->graphs[place];
  {
    const CurrentDevice current(work->gpu);
    SQZ_RETURN_IF_ERROR(graph.capture(
        work->stream.get(), [&](cudaStream_t stream) { return cuda::kmeans_run(params, stream); }));
  }
  const cuda::KmeansShape& shape = params.shape;
  Contender out;
  out.name = name;
  out.flop = 2.0 * shape.heads * shape.points * shape.clusters * shape.dim * (iterations + 1);
  out.run = [work, place](int64_t) {
    const CurrentDevice current(work->gpu);
    work->clock->watch(place);
    const Status status = work->graphs[place].run(work->stream.get());
    work->clock->watch(-1);
    return status;
  };
  out.details = [work, place, iterations] {
    const CurrentDevice current(work->gpu);
    JsonMembers json = {{"assignments", iterations + 1}, {"clock", work->clock->summary(place)}};
    const auto cosine = mean_cosine(*work, work->graphs[place]);
    if (cosine.ok()) json["mean_cosine"] = cosine.value();
    return json;
  };
  return out;
}

// One head, from host memory and back, which is how FAISS clusters.
Contender faiss(const std::shared_ptr<Work>& work, std::shared_ptr<KmeansEngine> engine,
                const KmeansPoints& points, uint64_t seed) {
  for (const BFloat16 x : points.rows.front()) work->faiss_points.push_back(to_float(x));
  work->faiss_labels.resize(static_cast<size_t>(points.points));
  KmeansProblem problem;
  problem.points = work->faiss_points.data();
  problem.count = points.points;
  problem.dim = points.dim;
  problem.clusters = points.clusters;
  problem.iterations = kIterations;
  problem.seed = seed;
  problem.assignment = work->faiss_labels.data();
  Contender out;
  out.name = engine->name() + ", one head";
  out.flop = 2.0 * static_cast<double>(points.points * points.clusters) *
             static_cast<double>(points.dim) * (kIterations + 1);
  out.part = 1.0 / static_cast<double>(points.heads);
  out.run = [work, engine, problem](int64_t) { return engine->run({&problem, 1}, 1, {}); };
  return out;
}

}  // namespace

Result<CaseSetup> kmeans_device_case(const Options& options, KmeansPoints points) {
  const auto work = std::make_shared<Work>();
  work->gpu = options.gpu;
  SQZ_RETURN_IF_ERROR(prepare(*work, points));
  CaseSetup setup;
  const cuda::DeviceProbe probe = cuda::probe_device(options.gpu);
  setup.shape = {{"heads", points.heads},
                 {"points", points.points},
                 {"head_dim", points.dim},
                 {"clusters", points.clusters},
                 {"iterations", kIterations},
                 {"keys", points.origin},
                 {"gpu", probe.name},
                 {"cuda_driver", probe.driver_version},
                 {"cuda_runtime", probe.runtime_version}};
  setup.rounds = options.repeat_or(5);
  SQZ_ASSIGN_OR_RETURN(Contender two, ours(work, 0, "cuda", kIterations, true));
  SQZ_ASSIGN_OR_RETURN(Contender one, ours(work, 1, "cuda, one stream", kIterations, false));
  SQZ_ASSIGN_OR_RETURN(Contender fewer,
                       ours(work, 2, "cuda, 10 assignments", kIterations - 1, true));
  setup.contenders = {std::move(two), std::move(one), std::move(fewer)};
  auto engine = make_faiss_gpu_kmeans(options.gpu);
  if (engine.ok()) {
    setup.contenders.push_back(faiss(work, std::move(engine.value()), points, options.seed));
  }
  setup.baselines = {"cuda"};
  return setup;
}

}  // namespace sqz::bench
