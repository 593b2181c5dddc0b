#include "formats/coded_rows.h"

#include <cmath>

#include "formats/base/random.h"

namespace sqz {
namespace {

constexpr int8_t kOneBit[] = {-127, 127};
constexpr int8_t kTwoBits[] = {-127, -38, 38, 127};

constexpr int64_t kScaleBytes = 2;

}  // namespace

const char* rows_name(RowKind rows) {
  return rows == RowKind::kQ8 ? "q8" : "16";
}

RowKind rows_of(std::string_view name) {
  return name == rows_name(RowKind::kQ8) ? RowKind::kQ8 : RowKind::k16;
}

std::span<const int8_t> code_levels(int bits) {
  if (bits == 1) return kOneBit;
  return kTwoBits;
}

double greatest_level(int bits) {
  return bits == 1 ? 0.7979 : 1.510;
}

CodedRows CodedRows::from_head(int64_t head, int64_t slots, int64_t dim) const {
  if (bits == 0) return {};
  return {bits, codes + head * slots * code_bytes(dim, bits),
          static_cast<const std::byte*>(scales) + head * slots * kScaleBytes};
}

void decode_row(const std::byte* codes, int bits, int64_t dim, int8_t* out) {
  const int64_t bytes = code_bytes(dim, bits);
  const unsigned mask = (1u << bits) - 1;
  for (int64_t i = 0; i < dim; ++i) {
    const unsigned code = static_cast<unsigned>(codes[i % bytes]) >> bits * (i / bytes) & mask;
    out[i] = bits == 8 ? static_cast<int8_t>(code) : code_levels(bits)[code];
  }
}

// Gram and Schmidt, twice a row for orthogonality to rounding. Sums of uniform numbers stand for
// normal ones, which would need functions that differ between machines.
std::vector<float> make_rotation(int64_t dim, uint64_t seed) {
  Random random(seed);
  const auto d = static_cast<size_t>(dim);
  std::vector<double> rows(d * d);
  for (double& x : rows) {
    for (int i = 0; i < 4; ++i) x += random.unit() - 0.5;
  }
  for (size_t r = 0; r < d; ++r) {
    double* row = rows.data() + r * d;
    for (size_t other = 0; other < 2 * r; ++other) {
      const double* before = rows.data() + other % r * d;
      double product = 0;
      for (size_t i = 0; i < d; ++i) product += row[i] * before[i];
      for (size_t i = 0; i < d; ++i) row[i] -= product * before[i];
    }
    double length = 0;
    for (size_t i = 0; i < d; ++i) length += row[i] * row[i];
    for (size_t i = 0; i < d; ++i) row[i] /= std::sqrt(length);
  }
  return {rows.begin(), rows.end()};
}

}  // namespace sqz
