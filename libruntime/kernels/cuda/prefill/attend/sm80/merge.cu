#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;

// A block a row tile, eight dimensions of a row a thread, parts in the order of their keys.
__global__ void __launch_bounds__(kThreads)
    sm80_merge_kernel(const __grid_constant__ Sm80Attend call, const __grid_constant__ Sm80Cut cut,
                      int rows) {
  const AttendParams& p = call.params;
  const int tile = static_cast<int>(blockIdx.x), pair = tile / cut.row_tiles;
  const int first = tile % cut.row_tiles * rows, head = pair % p.kv_heads;
  const int2 block = block_of(call.blocks, pair / p.kv_heads);
  const bool fault = Sm80Keys(call, pair).fault();
  const int chunks = p.dim / 8, stride = p.dim + 2;
#pragma unroll 1
  for (int item = threadIdx.x; item < rows * chunks; item += kThreads) {
    const int row = item / chunks, chunk = item % chunks, r = first + row;
    if (r >= block.y * p.group) return;
    const auto part = [&](int i) {
      return call.partials + ((int64_t{tile} * cut.parts + i) * rows + row) * stride;
    };
    float top = -3.0e38f, sum = 0, values[8] = {};
    for (int i = 0; i < cut.parts; ++i) top = fmaxf(top, part(i)[p.dim]);
    for (int i = 0; i < cut.parts; ++i) {
      const float* from = part(i);
      const float weight = exp2f(from[p.dim] - top);
      sum += from[p.dim + 1] * weight;
      for (int c = 0; c < 8; ++c) values[c] += from[chunk * 8 + c] * weight;
    }
    const float factor = fault ? NAN : sum == 0 ? 0 : 1 / sum;
    for (float& value : values) value *= factor;
    const int64_t token = block.x + r / p.group;
    const int64_t to = (token * p.kv_heads + head) * p.group + r % p.group;
    store_8(p.q_dtype, values, p.out, to * p.dim + chunk * 8);
    if (chunk != 0) continue;
    p.lse[to] = fault ? NAN : sum == 0 ? -INFINITY : (top + log2f(sum)) * 0.6931471805599453f;
  }
}

}  // namespace

Status sm80_merge(const Sm80Attend& call, const Sm80Cut& cut, int rows, cudaStream_t stream) {
  const auto tiles =
      static_cast<unsigned>(call.blocks.count * call.params.kv_heads * cut.row_tiles);
  return launch_blocks(sm80_merge_kernel, tiles, kThreads, 0, Device(), stream, call, cut, rows);
}

}  // namespace sqz::cuda
