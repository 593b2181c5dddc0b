#include "libindex/cuda/calibrate/kernels.h"

#include "libindex/score_bins.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/common/element.cuh"

namespace sqz::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;   // rows and columns of a block's tile of logits
constexpr int kDepth = 16;  // components at once

// 4 x 4 products a thread.
template <class Element>
__global__ void __launch_bounds__(kThreads) logits_kernel(const LogitParams params) {
  __shared__ float rows[kDepth][kTile + 1], columns[kDepth][kTile + 1];
  const int64_t head = blockIdx.z;
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const float* queries = params.queries + head * params.rows * params.dim;
  const auto* centroids =
      static_cast<const Element*>(params.centroids) + head * params.clusters * params.dim;
  const int y = threadIdx.x / 16, x = threadIdx.x % 16;
  float sums[4][4] = {};
  for (int depth = 0; depth < params.dim; depth += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int k = i % kDepth, row = first_row + i / kDepth, column = first_column + i / kDepth;
      const bool inside = depth + k < params.dim;
      rows[k][i / kDepth] = inside && row < params.rows
                                ? queries[static_cast<int64_t>(row) * params.dim + depth + k]
                                : 0.0f;
      columns[k][i / kDepth] =
          inside && column < params.clusters
              ? widen(centroids[static_cast<int64_t>(column) * params.dim + depth + k])
              : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = rows[k][y + 16 * i];
        b[i] = columns[k][x + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + y + 16 * i, column = first_column + x + 16 * j;
      if (row >= params.rows || column >= params.clusters) continue;
      params.logits[(head * params.rows + row) * params.clusters + column] =
          params.scale * sums[i][j];
    }
  }
}

template <class Combine>
__device__ float block_reduce(float value, const Combine& combine) {
  __shared__ float parts[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int w = 1; w < kThreads / 32; ++w) value = combine(value, parts[w]);
  __syncthreads();
  return value;
}

__device__ __forceinline__ bool scored(const UnitScores& params, int64_t head, int64_t unit,
                                       int cluster) {
  return params.sizes[head * params.clusters + cluster] != 0 &&
         (params.alive == nullptr ||
          params.alive[(head * params.units + unit) * params.clusters + cluster] != 0);
}

// A block a row.
__global__ void __launch_bounds__(kThreads) lse_kernel(const UnitScores params) {
  const int64_t head = blockIdx.y, row = blockIdx.x;
  const int64_t unit = params.row_units[row];
  if (unit < 0) return;
  const float* logits = params.logits + (head * params.rows + row) * params.clusters;
  float most = -INFINITY;
  bool fault = false;
  for (int c = threadIdx.x; c < params.clusters; c += kThreads) {
    if (!scored(params, head, unit, c)) continue;
    fault |= !(logits[c] < INFINITY);  // NaN too
    most = fmaxf(most, logits[c]);
  }
  if (fault) params.faults[head] = 1;
  most = block_reduce(most, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (int c = threadIdx.x; c < params.clusters; c += kThreads) {
    if (most == -INFINITY || !scored(params, head, unit, c)) continue;
    sum += static_cast<float>(params.sizes[head * params.clusters + c]) * expf(logits[c] - most);
  }
  sum = block_reduce(sum, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) {
    params.lse[head * params.rows + row] = sum > 0 ? most + logf(sum) : 0.0f;
  }
}

// log of the sum over `count` rows of exp(logit - lse).
__device__ float log_sum(const float* logits, const float* lse, int count, int clusters) {
  float most = -INFINITY, sum = 0;
  for (int i = 0; i < count; ++i) {
    const float value = logits[static_cast<int64_t>(i) * clusters] - lse[i];
    const float larger = fmaxf(most, value);
    if (larger == -INFINITY) continue;
    sum = sum * expf(most - larger) + expf(value - larger);
    most = larger;
  }
  return most + logf(sum);
}

// A thread a cluster of a unit.
__global__ void __launch_bounds__(kThreads) scores_kernel(const UnitScores params) {
  const int64_t head = blockIdx.z, unit = blockIdx.y;
  const int cluster = blockIdx.x * kThreads + threadIdx.x;
  if (cluster >= params.clusters) return;
  const int2 rows = params.unit_rows[unit];
  const int64_t first = head * params.rows + rows.x;
  const float* logits = params.logits + first * params.clusters + cluster;
  const float* lse = params.lse + first;
  float score = -INFINITY;
  if (scored(params, head, unit, cluster)) {
    score = log_sum(logits, lse, rows.y, params.clusters) - logf(static_cast<float>(rows.y));
  }
  params.scores[(head * params.units + unit) * params.clusters + cluster] = score;
}

__global__ void __launch_bounds__(kThreads) descend_kernel(const DescendParams params) {
  const int64_t head = blockIdx.z, unit = blockIdx.y;
  const int cluster = blockIdx.x * kThreads + threadIdx.x;
  if (cluster >= params.clusters) return;
  const int64_t place = head * params.units + unit;
  const bool kept = params.scores[place * params.clusters + cluster] >= params.threshold;
  const uint32_t* offsets = params.offsets + head * (params.clusters + 1) + cluster;
  for (uint32_t child = offsets[0]; child < offsets[1]; ++child) {
    params.next[place * params.children + child] = kept ? 1 : 0;
  }
}

// A block counts one unit of one head.
__global__ void __launch_bounds__(kThreads)
    record_kernel(const UnitScores params, unsigned long long* counts) {
  __shared__ uint32_t bins[kScoreBins];
  const int64_t head = blockIdx.y, unit = blockIdx.x;
  for (int b = threadIdx.x; b < kScoreBins; b += kThreads) bins[b] = 0;
  __syncthreads();
  const float* scores = params.scores + (head * params.units + unit) * params.clusters;
  for (int c = threadIdx.x; c < params.clusters; c += kThreads) {
    if (params.alive != nullptr &&
        params.alive[(head * params.units + unit) * params.clusters + c] == 0) {
      continue;
    }
    atomicAdd(&bins[score_bin(scores[c])], params.sizes[head * params.clusters + c]);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kScoreBins; b += kThreads) {
    if (bins[b] != 0) atomicAdd(&counts[head * kScoreBins + b], bins[b]);
  }
}

dim3 grid(int64_t work, int y, int z) {
  return dim3(static_cast<unsigned>((work + kThreads - 1) / kThreads), static_cast<unsigned>(y),
              static_cast<unsigned>(z));
}

}  // namespace

Status calibration_logits(const LogitParams& params, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((params.clusters + kTile - 1) / kTile),
                    static_cast<unsigned>((params.rows + kTile - 1) / kTile),
                    static_cast<unsigned>(params.heads));
  if (params.float16) {
    logits_kernel<__half><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    logits_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
  }
  return cuda_status(cudaGetLastError(), "calibration logits kernel");
}

Status calibration_lse(const UnitScores& params, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(params.rows), static_cast<unsigned>(params.heads));
  lse_kernel<<<blocks, kThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "calibration sums kernel");
}

Status calibration_scores(const UnitScores& params, cudaStream_t stream) {
  scores_kernel<<<grid(params.clusters, params.units, params.heads), kThreads, 0, stream>>>(params);
  return cuda_status(cudaGetLastError(), "calibration scores kernel");
}

Status calibration_descend(const DescendParams& params, cudaStream_t stream) {
  descend_kernel<<<grid(params.clusters, params.units, params.heads), kThreads, 0, stream>>>(
      params);
  return cuda_status(cudaGetLastError(), "calibration children kernel");
}

Status calibration_record(const UnitScores& params, unsigned long long* counts,
                          cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(params.units), static_cast<unsigned>(params.heads));
  record_kernel<<<blocks, kThreads, 0, stream>>>(params, counts);
  return cuda_status(cudaGetLastError(), "calibration counts kernel");
}

}  // namespace sqz::cuda
