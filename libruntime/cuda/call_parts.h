// Parts of a call as kernels see them.
#pragma once

#include <numbers>

#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

inline constexpr auto kLog2E = static_cast<float>(std::numbers::log2e);

// Queries and results from one token on.
struct CallRows {
  const std::byte* q;
  std::byte* out;
  LseRows lse;
};

// Bytes of `tokens` tokens of q.
inline int64_t query_bytes(const AttendCall& call, int64_t tokens) {
  return tokens * call.query_heads * call.head_dim * dtype_size(call.dtype);
}

inline CallRows rows_from(const AttendCall& call, int64_t token) {
  const int64_t row = token * call.query_heads;
  return {static_cast<const std::byte*>(call.q) + query_bytes(call, token),
          static_cast<std::byte*>(call.out) + row * call.value_dim * dtype_size(call.dtype),
          call.lse.from(row)};
}

inline PrefillShape prefill_shape(const IndexMetadata& metadata) {
  return {metadata.dtype, static_cast<int32_t>(metadata.model.head_dim),
          static_cast<int32_t>(metadata.model.kv_heads),
          static_cast<int32_t>(metadata.model.group_size()),
          static_cast<float>(metadata.model.attention_scale)};
}

}  // namespace sqz::cuda
