// `kmeans` on a GPU.
#include <numeric>

#include "libindex/cuda/kmeans.h"
#include "tools/sqz_bench/device_bench.h"
#include "tools/sqz_bench/kmeans_points.h"

namespace sqz::bench {
namespace {

using cuda::CurrentDevice;
using cuda::KmeansParams;

struct Work : DeviceBench {
  cuda::DeviceMemory memory;
  cuda::Stream second_stream;
  KmeansParams params;
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

Status prepare(Work& work, const KmeansPoints& points, int gpu) {
  const CurrentDevice current(gpu);
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
  auto* to = static_cast<char*>(const_cast<void*>(work.params.points));
  for (int64_t head = 0; head < points.heads; ++head) {
    const auto bytes = std::as_bytes(std::span(points.row(head)));
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(to, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    to += bytes.size();
  }
  SQZ_RETURN_IF_ERROR(work.second_stream.create());
  return work.open(gpu);
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
Result<Contender> ours(const std::shared_ptr<Work>& work, const KmeansPoints& points, int place,
                       const char* name, int iterations, bool two_streams) {
  KmeansParams params = work->params;
  params.iterations = iterations;
  params.second_stream = two_streams ? work->second_stream.get() : nullptr;
  const auto graph = std::make_shared<DeviceGraph>();
  const CurrentDevice while_capturing(work->gpu);
  SQZ_RETURN_IF_ERROR(graph->capture(
      work->stream.get(), [&](cudaStream_t stream) { return cuda::kmeans_run(params, stream); }));
  Contender out = replayed(work, name, place, graph);
  out.flop = static_cast<double>(points.heads) * points.flop(iterations + 1);
  out.details = [work, graph, place, iterations] {
    const CurrentDevice current(work->gpu);
    JsonMembers json = {{"assignments", iterations + 1}, {"clock", work->clock->summary(place)}};
    const auto cosine = mean_cosine(*work, *graph);
    if (cosine.ok()) json["mean_cosine"] = cosine.value();
    return json;
  };
  return out;
}

}  // namespace

Result<CaseSetup> kmeans_device_case(const Options& options) {
  SQZ_ASSIGN_OR_RETURN(const KmeansPoints points, kmeans_points(options));
  const auto work = std::make_shared<Work>();
  SQZ_RETURN_IF_ERROR(prepare(*work, points, options.gpu));
  CaseSetup setup;
  setup.shape = points.shape();
  setup.shape.merge(describe_gpu(options.gpu));
  setup.rounds = options.repeat_or(5);
  setup.baselines = {"cuda"};
  const struct {
    const char* name;
    int iterations;
    bool two_streams;
  } runs[] = {{"cuda", kIterations, true},
              {"cuda, one stream", kIterations, false},
              {"cuda, 10 assignments", kIterations - 1, true}};
  for (const auto& run : runs) {
    const int place = static_cast<int>(setup.contenders.size());
    SQZ_ASSIGN_OR_RETURN(Contender one,
                         ours(work, points, place, run.name, run.iterations, run.two_streams));
    setup.contenders.push_back(std::move(one));
  }
  auto engine = make_faiss_gpu_kmeans(options.gpu);
  if (engine.ok()) {  // one head, from host memory and back, which is how FAISS clusters
    Contender faiss = engine_contender(std::move(engine.value()), points, 1, options);
    faiss.name += ", one head";
    faiss.part = 1.0 / static_cast<double>(points.heads);
    setup.contenders.push_back(std::move(faiss));
  }
  return setup;
}

}  // namespace sqz::bench
