#include "libruntime/kernels/cuda/prefill/classify/weights.h"

#include <algorithm>
#include <cmath>

#include "formats/base/dtype.h"

namespace sqz::cuda {

bool pack_weights(const float* from, int64_t rows, int64_t columns, void* to) {
  constexpr float kMost = 65504;
  constexpr int64_t kLaneColumns = 8;
  auto* out = static_cast<uint16_t*>(to);
  bool sound = true;
  for (int64_t first = 0; first < rows; first += kWeightRows) {
    for (int64_t column = 0; column < columns; column += kWeightColumns) {
      for (int64_t row = first; row < first + kWeightRows; ++row) {
        for (int64_t c = column; c < column + kWeightColumns; c += kLaneColumns) {
          const int64_t present = row < rows ? std::clamp<int64_t>(columns - c, 0, 8) : 0;
          for (int64_t i = 0; i < present; ++i) {
            const float x = from[row * columns + c + i];
            sound = sound && std::abs(x) <= kMost;
            *out++ = to_float16(x).bits;
          }
          out = std::fill_n(out, kLaneColumns - present, uint16_t{0});
        }
      }
    }
  }
  return sound;
}

}  // namespace sqz::cuda
