// Rows of fewer than 16 bits a number: each is the mean of its finest cluster plus a scale times
// what its codes stand for (docs/format.md, "Rows of codes"). Codes of 8 bits are numbers of the
// residual itself; those of fewer are numbers of the residual times the index's rotation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace sqz {

// How the keys and values of clusters are stored.
enum class RowKind {
  k16,  // in the index's dtype
  kQ8   // in 8 bits a number
};
const char* rows_name(RowKind rows);     // "16", "q8"
RowKind rows_of(std::string_view name);  // and back; k16 for any other name

// Bytes of a row of `dim` codes. Dimension i is in byte i % code_bytes, from bit bits * (i /
// code_bytes) on.
constexpr int64_t code_bytes(int64_t dim, int bits) {
  return (dim * bits + 7) / 8;
}

// The numbers that codes of 1 and 2 bits stand for: levels of Lloyd and Max for a normal
// distribution, the greatest as 127. They ascend, so a code and its complement differ in sign
// alone.
std::span<const int8_t> code_levels(int bits);
// The greatest of these levels in standard deviations.
double greatest_level(int bits);

// Rows of one kind of a layer, as stored; `bits` is 0 if there are none.
struct CodedRows {
  int bits = 0;                      // 1, 2 or 8 a number
  const std::byte* codes = nullptr;  // [Hkv, M, code_bytes(d, bits)]
  const void* scales = nullptr;      // [Hkv, M] of the index's dtype, at least 0

  constexpr bool rotated() const { return bits > 0 && bits < 8; }
  // The rows of one KV head and the heads after it.
  CodedRows from_head(int64_t head, int64_t slots, int64_t dim) const;
};

// The numbers [dim] that a row of codes stands for, in [-127, 127], not scaled.
void decode_row(const std::byte* codes, int bits, int64_t dim, int8_t* out);

// An orthogonal matrix [d, d], the same on every machine: residuals are rows, x = r R.
std::vector<float> make_rotation(int64_t dim, uint64_t seed);

}  // namespace sqz
