// Parts of a call as kernels see them.
#pragma once

#include <bit>

#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// Queries and results from one token on.
struct CallRows {
  const std::byte* q;
  std::byte* out;
  LseRows lse;
};

// Bytes of `tokens` tokens of q or out.
inline int64_t row_bytes(const AttendCall& call, const ModelDescription& model, int64_t tokens) {
  return tokens * model.query_heads * model.head_dim * dtype_size(call.dtype);
}

inline CallRows rows_from(const AttendCall& call, const ModelDescription& model, int64_t token) {
  const int64_t skip = row_bytes(call, model, token);
  return {static_cast<const std::byte*>(call.q) + skip, static_cast<std::byte*>(call.out) + skip,
          call.lse.from(token * model.query_heads)};
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

// An engine's cache.
inline CacheSource cache_source(const EngineCache& cache, const ServedIndex& index,
                                const DeviceLayer& layer) {
  const bool paged = cache.page_size != 0;
  return {.keys = cache.keys,
          .values = cache.values,
          .token_stride = cache.token_stride,
          .head_stride = cache.head_stride,
          .page_stride = cache.page_stride,
          .page_shift = paged ? std::countr_zero(static_cast<uint64_t>(cache.page_size)) : 31,
          .block_table = paged ? cache.block_table : nullptr,
          .pages = cache.pages,
          .positions = layer.positions,
          .tokens = index.metadata().tokens,
          .sink = index.metadata().sink};
}

}  // namespace sqz::cuda
