#include "training/cuda/kernels.h"

#include <cfloat>

#include "libindex/cuda/kmeans/common/reduce.cuh"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/common/launch_options.h"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::training::cuda {
namespace {

using sqz::cuda::launch_team;
using sqz::cuda::LaunchOptions;
using sqz::cuda::load_1;
using sqz::cuda::store_1;
using sqz::cuda::warp_sum;
using sqz::cuda::widen;
namespace ptx = sqz::cuda::ptx;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
// As a tensor of type T would hold it.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return widen(narrow<T>(x));
}

// 16 bytes of T as floats.
template <class T>
constexpr int kLanes = 16 / sizeof(T);
template <class T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[kLanes<T>]) {
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) x[i] = widen(elements[i]);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared[i];
  return sum;
}

// Everything but weights may be read, and anything written, only after this.
__device__ __forceinline__ void begin() {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
}

// body(T{}) for the model's type.
template <class Body>
Status for_type(DType dtype, Body&& body) {
  return dtype == DType::kBF16 ? body(__nv_bfloat16{}) : body(float{});
}

template <class Kernel, class... Args>
Status launch(const ModelSizes& model, Kernel kernel, dim3 blocks, int threads, int64_t shared,
              cudaStream_t stream, const Args&... args) {
  LaunchOptions options(blocks, threads, 1, model.device, stream);
  return launch_team(kernel, options, shared, args...);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const __grid_constant__ RowParams p, const T* embedding, T* x, int32_t hidden) {
  begin();
  const int row = static_cast<int>(blockIdx.x), slot = p.slot[row];
  const int token = p.token[row] >= 0 ? p.token[row] : p.slot_token[slot];
  if (threadIdx.x == 0) p.place[row] = p.at[row] >= 0 ? p.at[row] : p.slot_length[slot];
  const T* from = embedding + static_cast<int64_t>(token) * hidden;
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += kThreads) {
    x[static_cast<int64_t>(row) * hidden + i] = from[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_norm_kernel(const __grid_constant__ NormParams p, int32_t hidden, float eps) {
  __shared__ float shared[kWarps];
  extern __shared__ float row_values[];  // [hidden]
  begin();
  const int64_t row = p.picked != nullptr ? p.picked[blockIdx.x] : static_cast<int>(blockIdx.x);
  T* x = static_cast<T*>(p.x) + row * hidden;
  const T* delta = p.delta == nullptr ? nullptr : static_cast<const T*>(p.delta) + row * hidden;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += kThreads) {
    float value = widen(x[i]);
    if (delta != nullptr) {
      value = rounded<T>(value + widen(delta[i]));
      if (p.picked == nullptr) x[i] = narrow<T>(value);
    }
    row_values[i] = value;
    sum += value * value;
  }
  const float scale = rsqrtf(block_sum(sum, shared) / static_cast<float>(hidden) + eps);
  T* out = static_cast<T*>(p.out) + static_cast<int64_t>(blockIdx.x) * hidden;
  const T* weight = static_cast<const T*>(p.weight);
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += kThreads) {
    out[i] = narrow<T>(rounded<T>(row_values[i] * scale) * widen(weight[i]));
  }
}

// A warp an output. The first weights are on their way before the kernel in front has ended.
template <class T>
__global__ void __launch_bounds__(kThreads)
    multiply_row_kernel(const __grid_constant__ ProductParams p) {
  constexpr int kAhead = 8;  // 16 bytes a lane each
  ptx::griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t pieces = p.in / kLanes<T>;
  const bool inside = row < p.out_features;
  const uint4* weight = static_cast<const uint4*>(p.weight) + (inside ? row : 0) * pieces;
  const uint4* x = static_cast<const uint4*>(p.x);
  uint4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int64_t at = lane + 32 * i;
    ahead[i] = at < pieces ? __ldcs(weight + at) : uint4{};
  }
  ptx::griddepcontrol_wait();
  float sum = 0;
  for (int64_t first = 0; first < pieces; first += 32 * kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = first + lane + 32 * i;
      if (at >= pieces) break;
      float w[kLanes<T>], v[kLanes<T>];
      unpack<T>(ahead[i], w);
      unpack<T>(x[at], v);
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) sum += w[j] * v[j];
      const int64_t next = at + 32 * kAhead;
      if (next < pieces) ahead[i] = __ldcs(weight + next);
    }
  }
  sum = warp_sum(sum);
  if (!inside || lane != 0) return;
  if (p.bias != nullptr) sum += widen(static_cast<const T*>(p.bias)[row]);
  static_cast<T*>(p.out)[row] = narrow<T>(sum);
}

// A warp a head: queries, then keys, then values.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(const __grid_constant__ RotateParams p, const __grid_constant__ ModelSizes m) {
  constexpr int kMostPairs = 4;  // of a lane, at d = 256
  begin();
  const int heads = m.query_heads + 2 * m.kv_heads, half = m.head_dim / 2;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int row = static_cast<int>(at / heads), head = static_cast<int>(at % heads);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.rows) return;
  const T* from = static_cast<const T*>(p.qkv) + at * m.head_dim;
  const bool query = head < m.query_heads, value = head >= m.query_heads + m.kv_heads;
  const int64_t place = p.place[row];
  float a[kMostPairs] = {}, b[kMostPairs] = {};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= half) continue;
    a[i] = widen(from[pair]);
    b[i] = widen(from[pair + half]);
    sum += a[i] * a[i] + b[i] * b[i];
  }
  const T* weight = static_cast<const T*>(query ? p.q_norm : p.k_norm);
  if (weight != nullptr && !value) {
    const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(m.head_dim) + m.rms_eps);
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= half) continue;
      a[i] = rounded<T>(rounded<T>(a[i] * scale) * widen(weight[pair]));
      b[i] = rounded<T>(rounded<T>(b[i] * scale) * widen(weight[pair + half]));
    }
  }
  const int kv = head - m.query_heads - (value ? m.kv_heads : 0);
  const int64_t own =
      ((static_cast<int64_t>(p.slot[row]) * m.kv_heads + kv) * p.capacity + place) * m.head_dim;
  T* cache = query ? nullptr : static_cast<T*>(value ? p.values : p.keys) + own;
  const int64_t q_at = (static_cast<int64_t>(row) * m.query_heads + head) * m.head_dim;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= half) continue;
    float left = a[i], right = b[i];
    if (!value) {
      const float c = p.cosine[place * half + pair], s = p.sine[place * half + pair];
      left = rounded<T>(__fsub_rn(__fmul_rn(a[i], c), __fmul_rn(b[i], s)));
      right = rounded<T>(__fadd_rn(__fmul_rn(b[i], c), __fmul_rn(a[i], s)));
    }
    if (query) {
      T* q = static_cast<T*>(p.q) + q_at;
      q[pair] = narrow<T>(left);
      q[pair + half] = narrow<T>(right);
      store_1(p.context_dtype, p.context_q, q_at + pair, left);
      store_1(p.context_dtype, p.context_q, q_at + pair + half, right);
      store_1(p.context_dtype, p.context_before, q_at + pair, a[i]);
      store_1(p.context_dtype, p.context_before, q_at + pair + half, b[i]);
    } else {
      cache[pair] = narrow<T>(left);
      cache[pair + half] = narrow<T>(right);
    }
  }
}

// A block a row and KV head; its warps take 32 keys at a time, a lane a key for the logits and a
// few dimensions for the values.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    attend_own_kernel(const __grid_constant__ OwnAttentionParams p,
                      const __grid_constant__ ModelSizes m) {
  constexpr int kMostGroup = 8, kColumns = kDim / 32;
  extern __shared__ float shared[];
  const int warps = static_cast<int>(blockDim.x) / 32;
  begin();
  const int group = m.query_heads / m.kv_heads;
  const int row = static_cast<int>(blockIdx.x) / m.kv_heads;
  const int kv = static_cast<int>(blockIdx.x) % m.kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int length = p.place[row] + 1;
  const int64_t first_head = static_cast<int64_t>(row) * m.query_heads + kv * group;
  const int64_t own = (static_cast<int64_t>(p.slot[row]) * m.kv_heads + kv) * p.capacity * kDim;
  const T* keys = static_cast<const T*>(p.keys) + own;
  const T* values = static_cast<const T*>(p.values) + own;
  float* q = shared;                      // [group, d], scaled
  float* states = shared + group * kDim;  // [warps, group, d + 2]
  const T* q_from = static_cast<const T*>(p.q) + first_head * kDim;
  for (int i = static_cast<int>(threadIdx.x); i < group * kDim; i += static_cast<int>(blockDim.x)) {
    q[i] = widen(q_from[i]) * m.attention_scale;
  }
  __syncthreads();
  float out[kMostGroup][kColumns] = {}, top[kMostGroup], sum[kMostGroup] = {};
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g) top[g] = -FLT_MAX;
  for (int first = warp * 32; first < length; first += warps * 32) {
    const int count = min(32, length - first);
    float weight[kMostGroup] = {};
    const uint4* key = reinterpret_cast<const uint4*>(
        keys + static_cast<int64_t>(first + min(lane, count - 1)) * kDim);
    for (int piece = 0; piece < kDim / kLanes<T>; ++piece) {
      float k[kLanes<T>];
      unpack<T>(key[piece], k);
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g >= group) break;
#pragma unroll
        for (int j = 0; j < kLanes<T>; ++j) weight[g] += k[j] * q[g * kDim + piece * kLanes<T> + j];
      }
    }
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      if (g >= group) break;
      const float logit = lane < count ? weight[g] : -INFINITY;
      const float highest = fmaxf(top[g], warp_max(logit));
      const float shrink = expf(top[g] - highest);
      weight[g] = expf(logit - highest);
      top[g] = highest;
      sum[g] = sum[g] * shrink + warp_sum(weight[g]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[g][c] *= shrink;
    }
    for (int i = 0; i < count; ++i) {
      const T* value = values + static_cast<int64_t>(first + i) * kDim;
      float v[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) v[c] = widen(value[lane + 32 * c]);
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g >= group) break;
        const float w = __shfl_sync(~0u, weight[g], i);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[g][c] += w * v[c];
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kMostGroup; ++g) {
    if (g >= group) break;
    float* state = states + (warp * group + g) * (kDim + 2);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state[lane + 32 * c] = out[g][c];
    if (lane == 0) {
      state[kDim] = top[g];
      state[kDim + 1] = sum[g];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < group * kDim; i += static_cast<int>(blockDim.x)) {
    const int g = i / kDim, c = i % kDim;
    const float context_lse = p.context_lse[first_head + g];
    float highest = context_lse;
    for (int w = 0; w < warps; ++w) {
      highest = fmaxf(highest, states[(w * group + g) * (kDim + 2) + kDim]);
    }
    const float context_weight = expf(context_lse - highest);
    float total = context_weight;
    // A context that is empty may have left anything: its 0 * NaN must not count.
    float value = context_weight == 0 ? 0
                                      : context_weight * load_1(p.context_dtype, p.context_out,
                                                                first_head * kDim + i);
    for (int w = 0; w < warps; ++w) {
      const float* state = states + (w * group + g) * (kDim + 2);
      const float share = expf(state[kDim] - highest);
      total += share * state[kDim + 1];
      value += share * state[c];
    }
    static_cast<T*>(p.out)[first_head * kDim + i] = narrow<T>(value / total);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) gate_kernel(const T* gate_up, T* out, int64_t width) {
  begin();
  const int64_t row = blockIdx.y, i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= width) return;
  const float x = widen(gate_up[2 * row * width + i]);
  const float silu = rounded<T>(x / (1.0f + expf(-x)));
  out[row * width + i] = narrow<T>(silu * widen(gate_up[(2 * row + 1) * width + i]));
}

constexpr int kChoiceThreads = 1024;

template <class T>
__global__ void __launch_bounds__(kChoiceThreads)
    choose_kernel(const __grid_constant__ ChoiceParams p, int32_t vocab) {
  __shared__ float best_of[kChoiceThreads / 32];
  __shared__ int32_t token_of[kChoiceThreads / 32];
  begin();
  const int part = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
  const T* logits = static_cast<const T*>(p.logits) + static_cast<int64_t>(part) * vocab;
  float best = -INFINITY;
  int32_t token = vocab;
  int bad = 0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kChoiceThreads) {
    const float x = widen(logits[i]);
    bad |= !isfinite(x);
    if (x > best) {
      best = x;
      token = i;
    }
  }
  const auto take = [&](float other, int32_t other_token) {
    if (other < best || (other == best && other_token >= token)) return;
    best = other;
    token = other_token;
  };
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, best, step);
    take(other, __shfl_xor_sync(~0u, token, step));
  }
  if (lane == 0) {
    best_of[threadIdx.x / 32] = best;
    token_of[threadIdx.x / 32] = token;
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kChoiceThreads / 32; ++i) take(best_of[i], token_of[i]);
  const int row = p.last_row[part], slot = p.slot[row];
  p.slot_token[slot] = bad != 0 ? 0 : token;
  p.slot_length[slot] = p.place[row] + 1;
  p.choice[part] = bad != 0 ? -1 : token;
}

}  // namespace

Status embed(const ModelSizes& model, const RowParams& rows, const void* embedding, void* x,
             cudaStream_t stream) {
  return for_type(model.dtype, [&](auto type) {
    using T = decltype(type);
    return launch(model, embed_kernel<T>, rows.rows, kThreads, 0, stream, rows,
                  static_cast<const T*>(embedding), static_cast<T*>(x), model.hidden);
  });
}

Status add_norm(const ModelSizes& model, const NormParams& params, cudaStream_t stream) {
  return for_type(model.dtype, [&](auto type) {
    return launch(model, add_norm_kernel<decltype(type)>, params.rows, kThreads,
                  int64_t{model.hidden} * 4, stream, params, model.hidden, model.rms_eps);
  });
}

Status multiply_row(const ModelSizes& model, const ProductParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((params.out_features + kWarps - 1) / kWarps);
  return for_type(model.dtype, [&](auto type) {
    return launch(model, multiply_row_kernel<decltype(type)>, blocks, kThreads, 0, stream, params);
  });
}

Status rotate(const ModelSizes& model, const RotateParams& params, cudaStream_t stream) {
  const int64_t heads = int64_t{params.rows} * (model.query_heads + 2 * model.kv_heads);
  return for_type(model.dtype, [&](auto type) {
    return launch(model, rotate_kernel<decltype(type)>,
                  static_cast<unsigned>((heads + kWarps - 1) / kWarps), kThreads, 0, stream, params,
                  model);
  });
}

Status attend_own(const ModelSizes& model, const OwnAttentionParams& params, cudaStream_t stream) {
  const int64_t group = model.query_heads / model.kv_heads, dim = model.head_dim;
  const int warps = group * dim > 1024 ? kWarps / 2 : kWarps;  // their states fit without asking
  const int64_t shared = group * (dim + warps * (dim + 2)) * 4;
  const auto run = [&](auto type, auto head_dim) {
    return launch(model, attend_own_kernel<decltype(type), head_dim.value>,
                  static_cast<unsigned>(params.rows * model.kv_heads), warps * 32, shared, stream,
                  params, model);
  };
  return for_type(model.dtype, [&](auto type) {
    if (dim == 64) return run(type, std::integral_constant<int, 64>());
    if (dim == 96) return run(type, std::integral_constant<int, 96>());
    if (dim == 128) return run(type, std::integral_constant<int, 128>());
    return run(type, std::integral_constant<int, 256>());
  });
}

Status gate(const ModelSizes& model, int32_t rows, const void* gate_up, void* out,
            cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((model.intermediate + kThreads - 1) / kThreads),
                    static_cast<unsigned>(rows));
  return for_type(model.dtype, [&](auto type) {
    using T = decltype(type);
    return launch(model, gate_kernel<T>, blocks, kThreads, 0, stream,
                  static_cast<const T*>(gate_up), static_cast<T*>(out),
                  int64_t{model.intermediate});
  });
}

Status choose(const ModelSizes& model, const ChoiceParams& params, cudaStream_t stream) {
  return for_type(model.dtype, [&](auto type) {
    return launch(model, choose_kernel<decltype(type)>, static_cast<unsigned>(params.parts),
                  kChoiceThreads, 0, stream, params, model.vocab);
  });
}

}  // namespace sqz::training::cuda
