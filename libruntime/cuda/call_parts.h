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
inline PrefillKeys prefill_keys(const AttendParams& params) {
  return {params.keys,
          params.values,
          static_cast<int32_t>(params.slots),
          params.exact_keys,
          params.exact_values,
          static_cast<int32_t>(params.exact),
          static_cast<int32_t>(params.exact_skipped),
          params.coded};
}

// Rows of codes; empty if the layer has none.
inline CodedSource coded_source(const DeviceLayer& layer) {
  if (layer.coded_keys.bits == 0) return {};
  const DeviceLevel& finest = layer.level[static_cast<size_t>(layer.levels - 1)];
  return {.keys = layer.coded_keys,
          .values = layer.coded_values,
          .clusters = layer.clusters_of_slots,
          .mean_keys = finest.centroids,
          .mean_values = finest.value_means,
          .count = static_cast<int32_t>(finest.clusters)};
}

}  // namespace sqz::cuda
