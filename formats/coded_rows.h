// Rows of 8 bits a number: each is the mean of its finest cluster plus a scale times its codes
// (docs/format.md, "Rows of codes").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sqz {

// How the keys and values of clusters are stored.
enum class RowKind {
  k16,  // in the index's dtype
  kQ8   // in 8 bits a number
};
const char* rows_name(RowKind rows);     // "16", "q8"
RowKind rows_of(std::string_view name);  // and back; k16 for any other name

// The keys or the values of a layer, as stored.
struct CodedRows {
  int bits = 0;                      // 8 a number; 0: there are no rows of codes
  const std::byte* codes = nullptr;  // [Hkv, M, d] of int8, -128 excepted
  const void* scales = nullptr;      // [Hkv, M] of the index's dtype, at least 0

  // The rows of one KV head and the heads after it.
  CodedRows from_head(int64_t head, int64_t slots, int64_t dim) const;
};

}  // namespace sqz
