// Weights of a query classifier as the kernels of this folder read them: float16, in tiles of 8
// rows and 32 columns, row of tiles after row of tiles; lanes of a warp find their part of a tile
// side by side. Lane 4 n + t has columns [8 t, 8 t + 8) of row n. What lies beyond the matrix is
// zero.
#pragma once

#include <cstdint>

namespace sqz::cuda {

inline constexpr int kWeightRows = 8;
inline constexpr int kWeightColumns = 32;
inline constexpr int kWeightTileBytes = 2 * kWeightRows * kWeightColumns;

constexpr int64_t weight_rows(int64_t rows) {
  return (rows + kWeightRows - 1) / kWeightRows;
}
constexpr int64_t weight_columns(int64_t columns) {
  return (columns + kWeightColumns - 1) / kWeightColumns;
}
constexpr int64_t weight_bytes(int64_t rows, int64_t columns) {
  return weight_rows(rows) * weight_columns(columns) * kWeightTileBytes;
}

// The networks of a layer in device memory.
struct ClassifierNetwork {
  int32_t hidden = 0;                   // H
  const void* hidden_weight = nullptr;  // [Hkv] weights [H, d]
  const float* hidden_bias = nullptr;   // [Hkv, H]
  const void* output_weight = nullptr;  // [Hkv] weights [C, H]
  const float* output_bias = nullptr;   // [Hkv, C] with the log of each bucket's size
};

// to [weight_bytes()]: from [rows, columns]. False if a number is NaN or beyond float16 (65504).
bool pack_weights(const float* from, int64_t rows, int64_t columns, void* to);

}  // namespace sqz::cuda
