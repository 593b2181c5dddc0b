// The states that the pieces of a list left for a row, added up in their order: a thread a row.
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/prefill/lookup/kernel.h"

namespace sqz::cuda {
namespace {

using namespace prefill;

constexpr int kDenominatorThreads = 256;

__global__ void __launch_bounds__(kDenominatorThreads)
    denominators_kernel(const __grid_constant__ PrefillLookupParams params) {
  begin_dependent();
  const int32_t list = blockIdx.x, kv_head = list % params.shape.kv_heads;
  const int2 block = block_of(params.blocks, list / params.shape.kv_heads);
  const int32_t row = blockIdx.y * kDenominatorThreads + threadIdx.x;
  if (row >= block.y * params.shape.group) return;
  const int32_t total = alive_clusters(params, list);
  const int32_t piece = kPieceTiles * params.row_plan.clusters;
  const int32_t pieces = params.sm90 ? (total + piece - 1) / piece : params.row_plan.pieces;
  const int64_t queries =
      static_cast<int64_t>(params.blocks.tokens) * params.shape.kv_heads * params.shape.group;
  const int64_t query =
      (static_cast<int64_t>(block.x + row / params.shape.group) * params.shape.kv_heads + kv_head) *
          params.shape.group +
      row % params.shape.group;
  float maximum = kLowestLogit, sum = 0;
#pragma unroll 4
  for (int32_t i = 0; i < pieces; ++i) {
    const float2 state = params.row_states[i * queries + query];
    add_sums(maximum, sum, state.x, state.y);
  }
  // If nothing is alive, no S is looked at, but none may be NaN.
  const float lse = sum == 0 ? 0.0f : maximum + log2f(sum);
  if (!(fabsf(lse) <= kMostLogit)) params.chosen.totals[list].fault = 1;
  params.lse[query] = lse;
}

}  // namespace

Status launch_denominators(const PrefillLookupParams& params, const Device& device,
                           cudaStream_t stream) {
  const int32_t rows = params.blocks.block_tokens * params.shape.group;
  const dim3 blocks(static_cast<unsigned>(params.blocks.count * params.shape.kv_heads),
                    static_cast<unsigned>((rows + kDenominatorThreads - 1) / kDenominatorThreads));
  return launch_blocks(denominators_kernel, blocks, kDenominatorThreads, 0, device, stream, params);
}

}  // namespace sqz::cuda
