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
__device__ __forceinline__ void unpack(uint4 raw, float (&x)[kLanes<T>]) {
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) x[i] = widen(elements[i]);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
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

// `out`, in shared memory: x, or with `norm` the norm of x + delta, which goes to `sum` (null:
// nowhere). A thread takes the same pieces throughout.
template <class T, int kWarpCount>
__device__ __forceinline__ void take_row(const uint4* x, const uint4* delta, const uint4* norm,
                                         uint4* sum, int pieces, float eps, uint4* out) {
  const int thread = static_cast<int>(threadIdx.x);
  if (norm == nullptr) {
    for (int i = thread; i < pieces; i += 32 * kWarpCount) out[i] = x[i];
    return;
  }
  __shared__ float sums[kWarpCount];
  float square = 0;
  for (int i = thread; i < pieces; i += 32 * kWarpCount) {
    float value[kLanes<T>], more[kLanes<T>];
    uint4 raw = x[i];
    if (delta != nullptr) {
      unpack<T>(raw, value);
      unpack<T>(delta[i], more);
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j)
        reinterpret_cast<T*>(&raw)[j] = narrow<T>(value[j] + more[j]);
    }
    unpack<T>(raw, value);
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) square += value[j] * value[j];
    out[i] = raw;
    if (sum != nullptr) sum[i] = raw;
  }
  square = warp_sum(square);
  if (thread % 32 == 0) sums[thread / 32] = square;
  __syncthreads();
  square = 0;
#pragma unroll
  for (int i = 0; i < kWarpCount; ++i) square += sums[i];
  const float scale = rsqrtf(square / static_cast<float>(pieces * kLanes<T>) + eps);
  for (int i = thread; i < pieces; i += 32 * kWarpCount) {
    float value[kLanes<T>], weight[kLanes<T>];
    unpack<T>(out[i], value);
    unpack<T>(norm[i], weight);
    uint4 raw;
#pragma unroll
    for (int j = 0; j < kLanes<T>; ++j) {
      reinterpret_cast<T*>(&raw)[j] = narrow<T>(rounded<T>(value[j] * scale) * weight[j]);
    }
    out[i] = raw;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_norm_kernel(const __grid_constant__ NormParams p, int32_t hidden, float eps) {
  extern __shared__ uint4 normed[];  // [pieces]
  begin();
  const int pieces = hidden / kLanes<T>;
  const int64_t row = p.picked != nullptr ? p.picked[blockIdx.x] : static_cast<int>(blockIdx.x);
  uint4* x = static_cast<uint4*>(p.x) + row * pieces;
  const auto* delta = static_cast<const uint4*>(p.delta);
  take_row<T, kWarps>(x, delta == nullptr ? nullptr : delta + row * pieces,
                      static_cast<const uint4*>(p.weight), p.picked == nullptr ? x : nullptr,
                      pieces, eps, normed);
  uint4* out = static_cast<uint4*>(p.out) + static_cast<int64_t>(blockIdx.x) * pieces;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) out[i] = normed[i];
}

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / 32;  // of multiply_row
constexpr int kAhead = 8;  // 16-byte pieces a lane has on their way

// 16-byte pieces of x in shared memory, filled up with zeros to whole steps of a warp.
__host__ __device__ constexpr int64_t filled_pieces(int64_t pieces) {
  return (pieces + 32 * kAhead - 1) / (32 * kAhead) * (32 * kAhead);
}

// Bytes of its shared memory: x, and the norm's weights.
int64_t row_shared(const ModelSizes& model, const ProductParams& params) {
  const int64_t bytes = params.in * dtype_size(model.dtype);
  return (params.norm != nullptr ? 2 : 1) * 16 * filled_pieces(bytes / 16);
}

// A warp an output, or an output's gate and its value, then the next one, in a block for each
// multiprocessor: more than one, and a kernel that starts early may find room for two blocks where
// others get none. Weights are loaded a step ahead, the first before the kernel in front has ended.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 1)
    multiply_row_kernel(const __grid_constant__ ProductParams p, float eps) {
  extern __shared__ uint4 x[];
  ptx::griddepcontrol_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int pieces = static_cast<int>(p.in / kLanes<T>);
  const int filled = static_cast<int>(filled_pieces(pieces)), steps = filled / (32 * kAhead);
  const int64_t stride = int64_t{gridDim.x} * kRowWarps;
  const int64_t first = blockIdx.x + int64_t{gridDim.x} * (thread / 32);
  const int half = p.gated ? 1 : 0;  // a gate's row is followed by its value's
  const int64_t outputs = p.out_features >> half;

  // What is loaded next.
  int64_t next = first;
  int next_part = 0, next_step = 0;
  const uint4* from = static_cast<const uint4*>(p.weight) + next * pieces + lane;
  const auto left = [&] { return next < outputs ? pieces - next_step * 32 * kAhead - lane : 0; };
  uint4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = 32 * i < left() ? __ldcs(from + 32 * i) : uint4{};
  uint4* norm = x + filled;
  if (p.norm != nullptr) {
    for (int i = thread; i < pieces; i += kRowThreads) {
      norm[i] = static_cast<const uint4*>(p.norm)[i];
    }
  }
  for (int i = pieces + thread; i < filled; i += kRowThreads) x[i] = uint4{};
  ptx::griddepcontrol_wait();
  take_row<T, kRowWarps>(static_cast<const uint4*>(p.x), static_cast<const uint4*>(p.delta),
                         p.norm == nullptr ? nullptr : norm,
                         blockIdx.x == 0 ? static_cast<uint4*>(p.sum) : nullptr, pieces, eps, x);
  __syncthreads();

  float gate = 0;
  for (int64_t output = first; output < outputs; output += stride) {
    for (int part = 0; part <= half; ++part) {
      const int64_t row = output + part * outputs;
      float sum = 0;
      for (int step = 0; step < steps; ++step) {
        from += 32 * kAhead;
        if (++next_step == steps) {
          next_step = 0;
          next_part ^= half;
          if (next_part == 0) next += stride;
          from = static_cast<const uint4*>(p.weight) + (next + next_part * outputs) * pieces + lane;
        }
        const int more = left();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          float w[kLanes<T>], v[kLanes<T>];
          unpack<T>(ahead[i], w);
          unpack<T>(x[(step * kAhead + i) * 32 + lane], v);
          ahead[i] = 32 * i < more ? __ldcs(from + 32 * i) : uint4{};
#pragma unroll
          for (int j = 0; j < kLanes<T>; ++j) sum += w[j] * v[j];
        }
      }
      sum = warp_sum(sum);
      if (p.bias != nullptr) sum += widen(static_cast<const T*>(p.bias)[row]);
      if (part < half) {
        gate = rounded<T>(sum);
        gate = rounded<T>(gate / (1.0f + expf(-gate)));
      } else if (lane == 0) {
        if (p.gated) sum = gate * rounded<T>(sum);
        static_cast<T*>(p.out)[output] = narrow<T>(sum);
      }
    }
  }
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

// A block a row and KV head; its warps take eight keys at a time, four lanes a key for the logits
// and a lane a few dimensions for the values.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    attend_own_kernel(const __grid_constant__ OwnAttentionParams p,
                      const __grid_constant__ ModelSizes m) {
  constexpr int kMostGroup = 8, kColumns = kDim / 32, kKeys = 8, kParts = 32 / kKeys;
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
  for (int first = warp * kKeys; first < length; first += warps * kKeys) {
    const int last = min(kKeys, length - first) - 1, part = lane % kParts;
    float weight[kMostGroup] = {};
    const uint4* key = reinterpret_cast<const uint4*>(
        keys + static_cast<int64_t>(first + min(lane / kParts, last)) * kDim);
#pragma unroll
    for (int piece = 0; piece < kDim / kLanes<T>; piece += kParts) {
      float k[kLanes<T>];
      unpack<T>(key[piece + part], k);
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g >= group) break;
        const float* with = q + g * kDim + (piece + part) * kLanes<T>;
#pragma unroll
        for (int j = 0; j < kLanes<T>; ++j) weight[g] += k[j] * with[j];
      }
    }
#pragma unroll
    for (int g = 0; g < kMostGroup; ++g) {
      if (g >= group) break;
#pragma unroll
      for (int step = 1; step < kParts; step *= 2) {
        weight[g] += __shfl_xor_sync(~0u, weight[g], step);
      }
      const float logit = lane / kParts <= last ? weight[g] : -INFINITY;
      const float highest = fmaxf(top[g], warp_max(logit));
      const float shrink = expf(top[g] - highest);
      weight[g] = expf(logit - highest);
      top[g] = highest;
      sum[g] = sum[g] * shrink + warp_sum(weight[g]) / kParts;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[g][c] *= shrink;
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const T* value = values + static_cast<int64_t>(first + min(i, last)) * kDim;
      float v[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) v[c] = widen(value[lane + 32 * c]);
#pragma unroll
      for (int g = 0; g < kMostGroup; ++g) {
        if (g >= group) break;
        const float w = __shfl_sync(~0u, weight[g], i * kParts);
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
  p.choice[part] = bad != 0 ? -1 : token;
  // A slot goes on behind its last row.
  const int row = p.last_row[part], slot = p.slot[row];
  if (part + 1 < p.parts && p.slot[p.last_row[part + 1]] == slot) return;
  p.slot_token[slot] = bad != 0 ? 0 : token;
  p.slot_length[slot] = p.place[row] + 1;
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
                  int64_t{model.hidden} * static_cast<int64_t>(sizeof(type)), stream, params,
                  model.hidden, model.rms_eps);
  });
}

bool fits_multiply_row(const ModelSizes& model, const ProductParams& params) {
  return params.in * dtype_size(model.dtype) % 16 == 0 &&
         row_shared(model, params) <= model.device.block_shared;
}

Status multiply_row(const ModelSizes& model, const ProductParams& params, cudaStream_t stream) {
  return for_type(model.dtype, [&](auto type) {
    return launch(model, multiply_row_kernel<decltype(type)>,
                  static_cast<unsigned>(model.device.multiprocessors), kRowThreads,
                  row_shared(model, params), stream, params, model.rms_eps);
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
