// From logits to the scores of buckets: the softmax of every query, added up over the tokens and
// heads of a block, over the bucket's size.
#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const __grid_constant__ BlockClassify call, int rows, int64_t head_rows) {
  begin_dependent();
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  const int head = static_cast<int>(blockIdx.y), lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int width = (call.lookup.level.clusters + 7) / 8 * 8;
  const float* logits = call.logits + (head * head_rows + row) * width;
  float maximum = kLowestLogit, sum = 0;
#pragma unroll 8
  for (int i = lane; i < width; i += 32) {
    const float x = logits[i];
    if (!(x <= maximum)) {
      sum *= exp2f(maximum - x);
      maximum = x;
    }
    sum += exp2f(x - maximum);
  }
  add_sums_of_lanes<32>(maximum, sum);
  if (lane == 0) call.lse[head * head_rows + row] = maximum + log2f(sum);
}

// From log2 of what a bucket's shares of so many rows sum to.
__device__ void put_score(const BlockClassify& call, int pair, int head, int bucket, float share,
                          int rows) {
  const PrefillLevel& level = call.lookup.level;
  const uint32_t size = level.sizes[int64_t{head} * level.clusters + bucket];
  const float found = share - log2f(static_cast<float>(rows)) - log2f(static_cast<float>(size));
  call.scores[int64_t{pair} * level.clusters + bucket] = size == 0 ? -INFINITY : found;
  if (size != 0 && !(found < INFINITY)) call.lookup.chosen.totals[pair].fault = 1;
}

// Warps take rows in turn, lanes are buckets: 32 of a pair.
__global__ void __launch_bounds__(kThreads)
    add_shares_kernel(const __grid_constant__ BlockClassify call, Stretch stretch,
                      int64_t head_rows) {
  begin_dependent();
  __shared__ float2 sums[kWarps][32];
  const PrefillLookup& lookup = call.lookup;
  const PrefillShape& p = lookup.shape;
  const int pair = static_cast<int>(blockIdx.x), head = pair % p.kv_heads;
  const int2 block = block_of(lookup.blocks, pair / p.kv_heads);
  const int last = block.x + block.y;
  const int begin = max(block.x, stretch.begin), end = min(last, stretch.end);
  if (begin >= end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int buckets = lookup.level.clusters, width = (buckets + 7) / 8 * 8;
  const int bucket = static_cast<int>(blockIdx.y) * 32 + lane;
  const int64_t first = head * head_rows;
  // In the log domain: the shares of far buckets are too small for a float.
  float maximum = kLowestLogit, sum = 0;
  if (bucket < buckets) {
#pragma unroll 8
    for (int row = (begin - stretch.begin) * p.group + warp; row < (end - stretch.begin) * p.group;
         row += kWarps) {
      const float x = call.logits[(first + row) * width + bucket] - call.lse[first + row];
      if (!(x <= maximum)) {
        sum *= exp2f(maximum - x);
        maximum = x;
      }
      sum += exp2f(x - maximum);
    }
  }
  sums[warp][lane] = make_float2(maximum, sum);
  __syncthreads();
  if (warp != 0 || bucket >= buckets) return;
  float* score = call.scores + int64_t{pair} * buckets + bucket;
  if (begin != block.x) add_sums(maximum, sum, *score, 1);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) add_sums(maximum, sum, sums[w][lane].x, sums[w][lane].y);
  const float share = maximum + log2f(sum);
  if (end < last) {
    *score = share;
    return;
  }
  put_score(call, pair, head, bucket, share, block.y * p.group);
}

}  // namespace

Status add_shares(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream) {
  const PrefillShape& p = call.lookup.shape;
  const int rows = stretch.rows(call);
  const int64_t head_rows = classify_rows(call.tokens, p.group);
  const dim3 row_grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps),
                      static_cast<unsigned>(p.kv_heads));
  SQZ_RETURN_IF_ERROR(launch_blocks(row_sums_kernel, row_grid, kThreads, 0, call.device, stream,
                                    call, rows, head_rows));
  const dim3 grid(static_cast<unsigned>(call.lookup.blocks.count * p.kv_heads),
                  static_cast<unsigned>((call.lookup.level.clusters + 31) / 32));
  return launch_blocks(add_shares_kernel, grid, kThreads, 0, call.device, stream, call, stretch,
                       head_rows);
}

}  // namespace sqz::cuda
