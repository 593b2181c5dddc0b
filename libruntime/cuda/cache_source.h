// An engine's cache as kernels see it.
#pragma once

#include <bit>

#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/decode_attend/kernel.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

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
