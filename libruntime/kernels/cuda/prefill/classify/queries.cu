// Queries to split matrices, turned back from their positions where they come after RoPE.
#include <algorithm>

#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostHalf = 256;  // of a query's dimensions

struct SplitCall {
  const void* q = nullptr;  // from the stretch's first token on
  DType dtype = DType::kBF16;
  int32_t tokens = 0, heads = 0, group = 0, dim = 0;
  int64_t rows = 0;  // of each head, to the end of a tile
  SplitMatrix to;
  const float* frequencies = nullptr;
  float shrink = 1;
  RunTotals* totals = nullptr;  // [lists] whose faults are cleared, if it is the first stretch
  int32_t lists = 0;
  float positions[kClassifyTokens]{};
};

// A block of threads a token; those beyond the last one fill tiles up.
__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ SplitCall call) {
  begin_dependent();
  __shared__ float cosines[kMostHalf], sines[kMostHalf];
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < call.lists; i += gridDim.x * kThreads) {
    call.totals[i].fault = 0;
  }
  const int token = static_cast<int>(blockIdx.x), half = call.dim / 2;
  const bool present = token < call.tokens, turned = call.frequencies != nullptr;
  if (turned && present) {
    for (int i = threadIdx.x; i < half; i += kThreads) {
      const float angle = call.positions[token] * call.frequencies[i];
      cosines[i] = cosf(angle) * call.shrink;
      sines[i] = sinf(angle) * call.shrink;
    }
  }
  __syncthreads();
  const int chunks = call.dim / 8;
#pragma unroll 1
  for (int item = threadIdx.x; item < call.heads * call.group * chunks; item += kThreads) {
    const int chunk = item % chunks, query = item / chunks;
    const int64_t row = int64_t{token} * call.group + query % call.group;
    if (row >= call.rows) continue;
    const int64_t from = (int64_t{token} * call.heads * call.group + query) * call.dim;
    float x[8] = {};
    if (present) load_8(call.dtype, call.q, from + chunk * 8, x);
    if (present && turned) {
      const bool upper = chunk * 8 >= half;
      const int angle = chunk * 8 - (upper ? half : 0);
      float y[8];
      load_8(call.dtype, call.q, from + chunk * 8 + (upper ? -half : half), y);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float sine = sines[angle + i];
        x[i] = x[i] * cosines[angle + i] + y[i] * (upper ? -sine : sine);
      }
    }
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split<F16>(x[2 * i], x[2 * i + 1], high[i], low[i]);
    uint4* to = call.to.words + query / call.group * call.to.stride +
                (row / kWeightRows * call.to.columns + chunk / 4) * 64 + row % 8 * 4 + chunk % 4;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    to[32] = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

}  // namespace

Status split_queries(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream) {
  const PrefillLookup& lookup = call.lookup;
  const PrefillShape& p = lookup.shape;
  const int64_t query = int64_t{p.kv_heads} * p.group * p.dim * dtype_size(lookup.q_dtype);
  SplitCall split;
  split.q = static_cast<const std::byte*>(lookup.queries) + stretch.begin * query;
  split.dtype = lookup.q_dtype;
  split.tokens = stretch.end - stretch.begin;
  split.heads = p.kv_heads;
  split.group = p.group;
  split.dim = p.dim;
  split.rows = classify_rows(split.tokens, p.group);
  split.to = call.queries;
  split.frequencies = call.frequencies;
  split.shrink = call.shrink;
  split.totals = lookup.chosen.totals;
  split.lists = stretch.begin == 0 ? lookup.blocks.count * p.kv_heads : 0;
  if (call.frequencies != nullptr) {
    std::transform(call.positions + stretch.begin, call.positions + stretch.end, split.positions,
                   [&](int64_t position) { return static_cast<float>(position - call.offset); });
  }
  const auto blocks = static_cast<unsigned>((split.rows + p.group - 1) / p.group);
  return launch_blocks(split_kernel, blocks, kThreads, 0, call.device, stream, split);
}

}  // namespace sqz::cuda
