// Attention of up to kTileRows query rows over a part of a KeySequence: one pass with an online
// softmax. A row is one query head of one token; all rows of a call share one KV head.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "libruntime/attention/head_keys.h"
#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A state before normalisation: out = values / sum, lse = maximum + log(sum). Without keys maximum
// is kLowest, and sum and values are 0.
struct PartialRows {
  float* maximum = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* values = nullptr;   // [rows, d]
};

struct AttendRows {
  KeySequence sequence;
  int64_t begin = 0, end = 0;  // of the sequence
  float scale = 0;
  int64_t rows = 0;
  const float* const* queries = nullptr;   // [rows] pointers to [d]
  const int64_t* first_visible = nullptr;  // [rows] sliding window: the first exact key that the
                                           // row may see; null = all
};

class AttendWorkspace {
 public:
  // coded: with memory for rows of codes.
  AttendWorkspace(const CpuKernels& kernels, int64_t dim, bool coded);

 private:
  friend class RowAttention;
  struct Buffers {
    float* queries;      // stream: packed [kFewRows, d32]; tile: transposed [d32, kTileRows]
    float* accumulator;  // the same shapes
    float* logits;       // stream: [rows, keys of a step]; tile: the other way round
    float* keys;         // [kTileKeys, d32]: keys, then values
    float* bias;         // [kMostKeys]
    float* maximum;      // [kTileRows]
    float* sum;          // [kTileRows]
    float* factor;       // [kTileRows]
    float* shares;       // weights of means, shaped as the logits
    float* coded;        // accumulator of rows of codes, shaped as the other
  };
  std::vector<std::unique_ptr<float[]>> floats_;
  Buffers buffers_{};
  std::vector<KeySpan> spans_;
  std::vector<const void*> pointers_;
  std::vector<CodedSpan> slots_;
  std::optional<CodedProducts> products_;
};

// Allocation-free. A NaN among queries or keys makes the state NaN.
void attend_rows(const CpuKernels& kernels, const AttendRows& work, AttendWorkspace& workspace,
                 const PartialRows& out);

}  // namespace sqz
