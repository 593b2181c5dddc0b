// Attention of up to kTileRows query rows over a part of a KeySequence: one pass with an online
// softmax. A row is one query head of one token; all rows of a call share one KV head.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "libruntime/attention/head_keys.h"
#include "libruntime/attention/lse_rows.h"
#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A state before normalisation: out = values / sum, lse = maximum + log(sum). Without keys maximum
// is kLowest, and sum and values are 0.
struct PartialRows {
  float* maximum = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* values = nullptr;   // [rows, dv]
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
  // widest: the most d or dv of a layer. coded: with memory for rows of codes, whose keys have
  // `dim`.
  AttendWorkspace(const CpuKernels& kernels, int64_t dim, int64_t widest, bool coded);

 private:
  friend class RowAttention;
  struct Buffers {
    float* queries;      // stream: packed [kFewRows, d32]; tile: transposed [d32, kTileRows]
    float* accumulator;  // the same shapes, of dv
    float* logits;       // stream: [rows, keys of a step]; tile: the other way round
    float* keys;         // [kTileKeys, d32]: keys, then values
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

// ---- States.

// Adds `part`, a state over other keys, to `into`. The result depends on the order of such calls,
// which the caller fixes.
void add_partial(const PartialRows& into, const PartialRows& part, int64_t rows, int64_t dim);

// out[c] = values[c] / sum as dtype, beyond it its largest number; *lse = maximum + log(sum).
// Without keys out is 0 and *lse -infinity. False if the state is NaN or infinite.
bool finish_row(const PartialRows& state, int64_t row, int64_t dim, DType dtype, void* out,
                float* lse);

// The same numbers in every row: 0 and -infinity for the state of no keys.
void fill_rows(DType dtype, int64_t rows, int64_t dim, void* out, const LseRows& lse,
               float out_value, float lse_value);

// Converts `count` numbers of F32, F16 or BF16 to float32. `out` may be null. False if a number is
// NaN or infinite.
bool to_finite_floats(DType dtype, const void* in, int64_t count, float* out);

// The other way, saturated as outputs are.
void store_floats(DType dtype, const float* in, int64_t count, void* out);

// Merges finished state b into a, [rows, dim]; lse -infinity means "no keys". A row whose lse is
// NaN or +infinity becomes NaN. Sinks are attended to as well.
void merge_rows(DType dtype, int64_t rows, int64_t dim, void* out_a, const LseRows& lse_a,
                const void* out_b, const ConstLseRows& lse_b, const Sinks& sinks = {});

}  // namespace sqz
