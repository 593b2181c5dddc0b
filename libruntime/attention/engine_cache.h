// Keys and values of the fixed context in an engine's own memory; see sqz_kv_cache.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sqz {

struct EngineCache {
  const void* keys = nullptr;                                  // of the index's dtype
  const void* values = nullptr;                                // the same strides
  int64_t token_stride = 0, head_stride = 0, page_stride = 0;  // in elements
  int64_t page_size = 0;                                       // tokens; 0 = one contiguous array
  const int32_t* block_table = nullptr;                        // [ceil(N / page_size)]
  int64_t pages = 0;                                           // in the engine's memory
  int64_t tokens = 0;                                          // N

  // Elements before the row of a token; on the host. Tokens and pages that are out of bounds are
  // read as the last token and as page 0.
  int64_t row(int64_t token, int64_t head) const {
    token = std::min(token, tokens - 1);
    int64_t page = 0;
    if (page_size != 0) {
      page = block_table[token / page_size];
      if (page < 0 || page >= pages) page = 0;
      token %= page_size;
    }
    return page * page_stride + head * head_stride + token * token_stride;
  }
};

}  // namespace sqz
