// The places of the lse of each row of a call; row = token * Hq + query head. For host and device.
#pragma once

#include <cstdint>
#include <type_traits>

#include "formats/base/host_device.h"

namespace sqz {

template <class Float>
struct BasicLseRows {
  Float* data = nullptr;
  int64_t heads = 1;  // Hq, or 1 if every row is token_stride after the one before
  int64_t token_stride = 1, head_stride = 0;  // in elements

  BasicLseRows() = default;
  BasicLseRows(Float* contiguous) : data(contiguous) {}  // implicit: [rows]
  BasicLseRows(Float* at, int64_t query_heads, int64_t of_token, int64_t of_head)
      : data(at), heads(query_heads), token_stride(of_token), head_stride(of_head) {
    if (of_token != query_heads * of_head) return;
    heads = 1;
    token_stride = of_head;
  }

  // ConstLseRows of LseRows.
  template <class Other, class = std::enable_if_t<std::is_same_v<const Other, Float>>>
  BasicLseRows(const BasicLseRows<Other>& rows)
      : data(rows.data),
        heads(rows.heads),
        token_stride(rows.token_stride),
        head_stride(rows.head_stride) {}

  SQZ_HOST_DEVICE Float& operator[](int64_t row) const {
    if (heads == 1) return data[row * token_stride];
    return data[row / heads * token_stride + row % heads * head_stride];
  }
  // From the first row of a token on.
  BasicLseRows from(int64_t row) const {
    BasicLseRows rest = *this;
    rest.data += row / heads * token_stride;
    return rest;
  }
};

using LseRows = BasicLseRows<float>;
using ConstLseRows = BasicLseRows<const float>;

// Logits of attention sinks, which have a weight and no value: one a query head, float32. Without
// data there are none.
struct Sinks {
  const float* data = nullptr;  // [heads]
  int64_t heads = 1;            // of row r: r % heads
};

}  // namespace sqz
