// k-means on the GPU it runs on: kmeans_bench [heads points dim clusters iterations [spare]]
// Without arguments the shapes of docs/kmeans-gpu.md. Random points; a graph of the whole run is
// replayed and the median time taken. TFLOP/s count the assignments alone, 2 N C d each, over the
// whole time.
#include "libindex/cuda/kmeans.h"
#include "tests/bench/gpu_bench.cuh"

namespace {

using namespace sqz::cuda;
using namespace sqz::test;

constexpr Replays kReplays = {4, 21, 1, 2500};

void bench(const KmeansShape& shape, int iterations, AssignKernel kernel, int spare = 0) {
  const size_t rows = static_cast<size_t>(shape.heads) * shape.points;
  const size_t clusters = static_cast<size_t>(shape.heads) * shape.clusters;
  KmeansParams params;
  params.shape = shape;
  params.iterations = iterations;
  params.kernel = kernel;
  params.spare_multiprocessors = spare;
  auto* points = allocate<__nv_bfloat16>(rows * shape.dim);
  fill_kernel<<<4096, 256>>>(points, static_cast<int64_t>(rows) * shape.dim, 0);
  check(cudaDeviceSynchronize(), "fill");
  params.points = points;
  params.centroids = allocate<__nv_bfloat16>(clusters * shape.dim);
  params.labels = allocate<uint32_t>(rows);
  params.order = allocate<uint32_t>(rows);
  params.offsets = allocate<uint32_t>(clusters + shape.heads);
  params.cosines = allocate<float>(rows);
  params.fault = allocate<uint32_t>(1);
  auto bytes = kmeans_workspace(shape);
  check(bytes.status());
  params.workspace_bytes = bytes.value();
  params.workspace = allocate<char>(params.workspace_bytes);

  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  const double flop = 2.0 * static_cast<double>(rows) * shape.clusters * shape.dim;
  const double one_stream =
      milliseconds(stream, kReplays, [&] { check(kmeans_run(params, stream)); });
  check(cudaStreamCreate(&params.second_stream), "stream");
  const double run = milliseconds(stream, kReplays, [&] { check(kmeans_run(params, stream)); });
  const double assign =
      milliseconds(stream, kReplays, [&] { check(kmeans_assign(params, stream)); });
  uint32_t counters[2] = {};
  const size_t counters_at = 2 * ((rows * 4 + 255) / 256 * 256) + (rows * 8 + 255) / 256 * 256 + 8;
  check(cudaMemcpy(counters, static_cast<char*>(params.workspace) + counters_at, 8,
                   cudaMemcpyDeviceToHost),
        "counters");
  std::vector<float> cosines(rows);
  check(cudaMemcpy(cosines.data(), params.cosines, rows * sizeof(float), cudaMemcpyDeviceToHost),
        "cosines");
  double objective = 0;
  for (const float cosine : cosines) objective += cosine;
  std::printf(
      "%5d heads x %7d x d%-3d C %6d  %2d it %s  run %9.3f ms (%5.1f TFLOP/s, one stream %9.3f ms) "
      " assign "
      "%8.3f ms (%5.1f TFLOP/s)  doubtful %.2e + %.2e  "
      "objective %.6f\n",
      shape.heads, shape.points, shape.dim, shape.clusters, iterations,
      kernel == AssignKernel::kPlain ? "plain" : "auto ", run, flop * (iterations + 1) / run / 1e9,
      one_stream, assign, flop / assign / 1e9, counters[0] / static_cast<double>(rows),
      counters[1] / static_cast<double>(rows), objective / static_cast<double>(rows));
  std::fflush(stdout);
  check(cudaStreamDestroy(params.second_stream), "stream");
  check(cudaStreamDestroy(stream), "stream");
  for (const void* data :
       {params.points, static_cast<const void*>(params.centroids),
        static_cast<const void*>(params.labels), static_cast<const void*>(params.order),
        static_cast<const void*>(params.offsets), static_cast<const void*>(params.cosines),
        static_cast<const void*>(params.fault), static_cast<const void*>(params.workspace)}) {
    check(cudaFree(const_cast<void*>(data)), "cudaFree");
  }
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  int driver = 0, runtime = 0, clock = 0;
  check(cudaDriverGetVersion(&driver), "driver");
  check(cudaRuntimeGetVersion(&runtime), "runtime");
  check(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0), "clock");
  std::printf("%s, %d SMs, highest clock %d MHz, CUDA driver %d, runtime %d\n", device.name,
              device.multiProcessorCount, clock / 1000, driver, runtime);
  if (argc > 4) {
    bench({std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])},
          argc > 5 ? std::atoi(argv[5]) : 10, AssignKernel::kAuto,
          argc > 6 ? std::atoi(argv[6]) : 0);
    return 0;
  }
  const KmeansShape shapes[] = {{64, 32768, 128, 1638},   {256, 131072, 128, 1311},
                                {256, 131072, 128, 6554}, {8, 524288, 128, 26214},
                                {256, 131072, 64, 6554},  {64, 131072, 96, 6554},
                                {64, 131072, 256, 6554}};
  for (const KmeansShape& shape : shapes) bench(shape, 10, AssignKernel::kAuto);
  bench({16, 131072, 128, 6554}, 2, AssignKernel::kPlain);
  return 0;
}
