// The CPU's inner loops, compiled once per instruction set and chosen at run time.
//
// Two shapes of work, two data layouts:
//   stream  a few query rows (decode) against keys read once from memory: lanes run along d.
//   tile    many query rows (prefill) against a tile of keys held in cache: lanes run along rows.
// Keys, values and centroids are read as stored (BF16, F16, F32, or I8 of rows of codes); all
// arithmetic is float32.
//
// Every buffer that is not "as stored" has its row length padded: dims to padded_dim(), keys and
// rows to kLanePad. Padding of inputs must be finite unless said otherwise; results there are
// unspecified. Nothing allocates, nothing fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "formats/base/dtype.h"

namespace sqz {

inline constexpr int64_t kLanePad = 16;   // floats: a multiple of every target's vector
inline constexpr int64_t kFewRows = 8;    // up to here the stream kernels are the faster ones
inline constexpr int64_t kTileRows = 64;  // most rows of a tile

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t padded_dim(int64_t dim) {
  return round_up(dim, 2 * kLanePad);
}

// A running maximum starts at the lowest finite number instead of at minus infinity, so that its
// difference to itself is 0. A logit of this size still counts.
inline constexpr float kLowest = -std::numeric_limits<float>::max();

// While a kernel is at row j it prefetches row j + distance, if there are as many pointers.
struct Ahead {
  int64_t distance = 0;  // 0 = none
  int64_t rows = 0;      // pointers in the array, of which a kernel may use the first only

  bool has(int64_t row) const { return distance > 0 && row < rows; }
};

// Prefetches bytes [begin, end) of a row into L2, whose queue of misses is longer than L1's. It is
// always inline, because gcc takes a function that only prefetches for one without effect and drops
// calls of it.
[[gnu::always_inline]] inline void prefetch_row(const void* row, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; b += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + b, 0, 2);
  }
}

struct CpuKernels {
  const char* name;  // "baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16"

  // ---- stream: "packed" rows have the order of dimensions that suits the target and dtype.
  // out[r] = packed rows[r]; rows [r][dim] float32, `stride` floats apart; out [r][padded_dim].
  void (*pack)(DType dtype, const float* rows, int64_t stride, int64_t count, int64_t dim,
               float* out);
  void (*unpack)(DType dtype, const float* packed, int64_t count, int64_t dim, float* rows,
                 int64_t stride);
  // out[r * ld + j] = packed[r] . keys[j]; keys[j] points to a row [dim] as stored. out needs no
  // padding.
  void (*dots)(DType dtype, const float* packed, int64_t rows, const void* const* keys, int64_t n,
               int64_t dim, float* out, int64_t ld, Ahead ahead);
  // acc[r] += sum_j p[r * ld + j] values[j]; acc packed [rows][padded_dim]; the rest as for dots.
  void (*accumulate)(DType dtype, const float* p, int64_t ld, int64_t rows,
                     const void* const* values, int64_t n, int64_t dim, float* acc, Ahead ahead);
  // pack() and dots() for BF16 keys and queries that are BF16 numbers; false if one is not: use the
  // others. Null where the processor has no such instruction.
  bool (*pack_bf16)(const float* rows, int64_t stride, int64_t count, int64_t dim,
                    float* out) = nullptr;
  void (*dots_bf16)(const float* packed, int64_t rows, const void* const* keys, int64_t n,
                    int64_t dim, float* out, int64_t ld, Ahead ahead) = nullptr;
  // One online-softmax step of one row: x[j] *= scale, the running maximum and sum are updated, x
  // becomes exp(x - maximum). Returns the factor by which earlier sums must be scaled. x has room
  // for n rounded up to kLanePad. `finite`: an x[j] of -infinity is an overflow, and makes the sum
  // NaN.
  float (*softmax_row)(float* x, int64_t n, float scale, bool finite, float* maximum, float* sum);
  // x[0 .. n) *= factor; x padded to kLanePad.
  void (*scale)(float* x, int64_t n, float factor);

  // ---- tile: `rows` is a multiple of kLanePad, at most kTileRows.
  // out [n][padded_dim] float32 = in [n][dim] as stored; padding is zeroed.
  void (*to_float)(DType dtype, const void* in, int64_t n, int64_t dim, float* out);
  // c[i][r] (+)= sum_k a[i * a_row + k * a_col] b[k][r]; b [depth][rows], c [m][rows].
  void (*multiply)(const float* a, int64_t a_row, int64_t a_col, const float* b, float* c,
                   int64_t m, int64_t depth, int64_t rows, bool add);
  // multiply() of BF16 keys [n][dim] as stored with BF16 queries: out [n][lanes]. pair_bf16() packs
  // `count` rows [dim] for it, the other lanes are zero: [dim / 2][lanes] pairs of numbers. False
  // if one is not a BF16 number or dim is odd: use multiply(). Null where the processor has no such
  // instruction.
  bool (*pair_bf16)(const float* const* rows, int64_t count, int64_t lanes, int64_t dim,
                    float* out) = nullptr;
  void (*tile_bf16)(const float* pairs, int64_t lanes, const void* keys, int64_t n, int64_t dim,
                    float* out) = nullptr;
  // softmax_row() for `rows` lanes at once: x [n][rows], maximum, sum, factor [rows].
  void (*softmax_lanes)(float* x, int64_t n, int64_t rows, float scale, bool finite, float* maximum,
                        float* sum, float* factor);
  // x[i][r] *= factor[r]; x [n][rows].
  void (*scale_lanes)(float* x, int64_t n, int64_t rows, const float* factor);

  // ---- scores (select/score.cc); n is a multiple of kLanePad, padding of x is -infinity.
  // x *= scale; returns log sum_j weights[j] exp(x[j]): -infinity if all weights are 0. NaN if an x
  // is NaN or +infinity, or -infinity with a weight above 0.
  float (*log_sum_exp)(float* x, const float* weights, int64_t n, float scale);
  // Adds rows to running log-domain sums: with y = x[r * ld + j] - lse[r], maximum[j] = max(.., y)
  // and sum[j] = the sum of exp(y - maximum[j]) over all rows so far. Start: kLowest, 0.
  void (*add_rows)(const float* x, int64_t ld, const float* lse, int64_t rows, int64_t n,
                   float* maximum, float* sum);
  // scores[j] = maximum[j] + log(sum[j]) - log_count; n need not be a multiple.
  void (*finish_mean)(const float* maximum, const float* sum, int64_t n, float log_count,
                      float* scores);

  // ---- pages (select/scorers.cc).
  // out[j] = upper . max[j] + lower . min[j]; upper, lower: packed rows; min, max [n][dim] as
  // stored. With upper = max(q, 0) and lower = min(q, 0) that is the sum over c of
  // max(q[c] min[j][c], q[c] max[j][c]).
  void (*page_bounds)(DType dtype, const float* upper, const float* lower, const void* min,
                      const void* max, int64_t n, int64_t dim, float* out);

  // ---- rows of codes (attention/coded_products.h).
  // pack() and dots() with queries of 16 bits, in whole numbers. pack_i16(): out [padded_dim],
  // times *scale; false if the row is not finite or too long: use pack(). dots_i16(): keys point to
  // rows of 8 bits, scales [rows] are those of the queries. Null where the processor has no such
  // instruction.
  bool (*pack_i16)(const float* row, int64_t dim, int16_t* out, float* scale) = nullptr;
  void (*dots_i16)(const int16_t* packed, const float* scales, int64_t rows,
                   const void* const* keys, int64_t n, int64_t dim, float* out, int64_t ld,
                   Ahead ahead) = nullptr;
};

// The best table for this machine.
const CpuKernels& cpu_kernels();
// All tables that this machine can run, slowest first. For tests.
std::span<const CpuKernels* const> available_cpu_kernels();

}  // namespace sqz
