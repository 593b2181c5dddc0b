// Keys and values as an engine's cache has them.
#pragma once

#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda::test {

// Rows of a layer by token, [Hkv][N] of d elements, from what the index stores by slot.
inline std::vector<uint16_t> by_token(const Served& served, int64_t layer, bool values) {
  const LayerView& view = served.index->layers[static_cast<size_t>(layer)];
  const int64_t n = served.options.tokens, d = view.head_dim;
  std::vector<uint16_t> rows(static_cast<size_t>(view.kv_heads * n * d));
  const auto* slots = static_cast<const uint16_t*>(values ? view.values : view.keys);
  const auto* exact = static_cast<const uint16_t*>(values ? view.exact_values : view.exact_keys);
  for (int64_t h = 0; h < view.kv_heads; ++h) {
    const auto put = [&](int64_t token, const uint16_t* row) {
      std::copy(row, row + d, rows.begin() + (h * n + token) * d);
    };
    for (int64_t s = 0; s < view.slots; ++s) {
      put(view.positions[h * view.slots + s], slots + (h * view.slots + s) * d);
    }
    for (int64_t e = 0; e < view.exact; ++e) {
      const int64_t sink = view.slots > 0 ? served.options.sink : view.exact;
      put(e < sink ? e : n - view.exact + e, exact + (h * view.exact + e) * d);
    }
  }
  return rows;
}

// [pages][page_size][Hkv][d] by a block table, or [N][Hkv][d] without pages.
struct PagedRows {
  std::vector<uint16_t> rows;
  std::vector<int32_t> table;
  int64_t pages = 0;
};

inline PagedRows paged(const std::vector<uint16_t>& rows, int64_t heads, int64_t n, int64_t d,
                       int64_t page_size) {
  PagedRows out;
  const int64_t size = page_size == 0 ? n : page_size;
  const int64_t used = (n + size - 1) / size;
  out.pages = used + 3;
  for (int64_t i = 0; i < used; ++i) {
    // Backwards, with gaps.
    out.table.push_back(static_cast<int32_t>(page_size == 0 ? 0 : out.pages - 1 - i));
  }
  out.rows.assign(static_cast<size_t>(out.pages * size * heads * d), 0x7FC0);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t at = out.table[static_cast<size_t>(t / size)] * size + t % size;
    for (int64_t h = 0; h < heads; ++h) {
      std::copy(rows.begin() + (h * n + t) * d, rows.begin() + (h * n + t + 1) * d,
                out.rows.begin() + (at * heads + h) * d);
    }
  }
  return out;
}

// A layer's keys and values in device memory, in pages or, with pages of 0 tokens, without.
class CachedRows {
 public:
  CachedRows(const Served& served, int64_t layer, int64_t page_size)
      : CachedRows(served, page_size, rows_of(served, layer, false, page_size),
                   rows_of(served, layer, true, page_size)) {}

 private:
  static PagedRows rows_of(const Served& served, int64_t layer, bool values, int64_t page_size) {
    return paged(by_token(served, layer, values), served.options.kv_heads, served.options.tokens,
                 served.options.head_dim, page_size);
  }
  CachedRows(const Served& served, int64_t page_size, const PagedRows& keys,
             const PagedRows& values)
      : keys_(keys.rows), values_(values.rows), table_(keys.table) {
    const int64_t row = served.options.kv_heads * served.options.head_dim;
    cache = {.keys = keys_.get(),
             .values = values_.get(),
             .token_stride = row,
             .head_stride = served.options.head_dim,
             .page_stride = page_size * row,
             .page_size = page_size,
             .block_table = table_.get(),
             .pages = keys.pages};
  }

  DeviceArray<uint16_t> keys_, values_;
  DeviceArray<int32_t> table_;

 public:
  EngineCache cache;
};

}  // namespace sqz::cuda::test
