// Turns rows back by RoPE's angles of one position, and takes memory for them
// (libruntime/cuda/backend.h). A thread a pair of dimensions.
#include <algorithm>

#include "libruntime/cuda/backend.h"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostHalf = 256;  // head dimension 512
constexpr int64_t kMostGrid = 65536;

struct TurnRowsParams {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int32_t dim = 0, half = 0;  // dimensions i and half + i are a pair, the last are copied
  const void* from = nullptr;
  void* to = nullptr;
  float cosines[kMostHalf], sines[kMostHalf];
};

__global__ void __launch_bounds__(kThreads)
    turn_rows_kernel(const __grid_constant__ TurnRowsParams p) {
  const int width = p.dim - p.half;  // threads of a row
  const int64_t all = p.rows * width, step = int64_t{gridDim.x} * kThreads;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < all; item += step) {
    const int64_t row = item / width * p.dim;
    const int i = static_cast<int>(item % width);
    if (i >= p.half) {
      const int64_t at = row + p.half + i;
      store_1(p.dtype, p.to, at, load_1(p.dtype, p.from, at));
      continue;
    }
    const float a = load_1(p.dtype, p.from, row + i);
    const float b = load_1(p.dtype, p.from, row + p.half + i);
    store_1(p.dtype, p.to, row + i, a * p.cosines[i] + b * p.sines[i]);
    store_1(p.dtype, p.to, row + p.half + i, b * p.cosines[i] - a * p.sines[i]);
  }
}

}  // namespace

Result<std::shared_ptr<void>> device_memory(int gpu, size_t bytes) {
  const CurrentDevice current(gpu);
  auto memory = std::make_shared<DeviceMemory>();
  SQZ_RETURN_IF_ERROR(memory->reserve(bytes));
  return std::shared_ptr<void>(memory, memory->data());
}

Status turn_rows(int gpu, const RopeUndo& rope, int64_t position, DType dtype, int64_t rows,
                 int64_t dim, const void* from, void* to, void* stream) {
  if (rows == 0) return {};
  TurnRowsParams params{dtype,
                        rows,
                        static_cast<int32_t>(dim),
                        static_cast<int32_t>(rope.frequencies().size()),
                        from,
                        to,
                        {},
                        {}};
  rope.angles(position, params.cosines, params.sines);
  const CurrentDevice current(gpu);
  const int64_t blocks = (rows * (dim - params.half) + kThreads - 1) / kThreads;
  return launch_blocks(turn_rows_kernel, static_cast<unsigned>(std::min(blocks, kMostGrid)),
                       kThreads, 0, Device(), static_cast<cudaStream_t>(stream), params);
}

}  // namespace sqz::cuda
