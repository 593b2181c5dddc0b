// Scores of clusters for calibration (libindex/calibration_scorer.h), for the KV heads of a layer
// at once. Equations 1 to 3 in the log domain, as in libruntime/select/score.h. Device pointers and
// a stream, no allocation, no waiting; sums in an order of their own, the same from run to run.
//
// B heads; R query rows a head: n tokens times the heads of a GQA group; U units, each of some rows
// that follow each other; C clusters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/base/status.h"

namespace sqz::cuda {

// logits[b, r, c] = scale * queries[b, r] . centroids[b, c]
struct LogitParams {
  int32_t heads = 0, rows = 0, clusters = 0, dim = 0;
  float scale = 0;
  bool float16 = false;             // centroids are f16
  const float* queries = nullptr;   // [B, R, d]
  const void* centroids = nullptr;  // [B, C, d] bf16
  float* logits = nullptr;          // [B, R, C]
};
Status calibration_logits(const LogitParams& params, cudaStream_t stream);

// What the next ones share: one level, one scope.
struct UnitScores {
  int32_t heads = 0, rows = 0, units = 0, clusters = 0;
  const int2* unit_rows = nullptr;     // [U]: first row, rows
  const int32_t* row_units = nullptr;  // [R]: the unit of a row, or negative
  const uint32_t* sizes = nullptr;     // [B, C]: keys below; 0 scores -infinity
  const uint8_t* alive = nullptr;      // [B, U, C], or null: all
  const float* logits = nullptr;       // [B, R, C]
  float* lse = nullptr;                // [B, R]
  float* scores = nullptr;             // [B, U, C]
  uint32_t* faults = nullptr;          // [B]: becomes 1 where a logit is NaN or +infinity
};

// lse[b, r] = log sum_c sizes[b, c] exp(logits[b, r, c]) over what is alive; 0 if nothing is.
Status calibration_lse(const UnitScores& params, cudaStream_t stream);

// scores[b, u, c] from lse.
Status calibration_scores(const UnitScores& params, cudaStream_t stream);

// next[b, u, i] = 1 for the children i of clusters with a score of at least `threshold`, else 0.
struct DescendParams {
  int32_t heads = 0, units = 0, clusters = 0, children = 0;
  float threshold = 0;
  const float* scores = nullptr;      // [B, U, C]
  const uint32_t* offsets = nullptr;  // [B, C + 1]: first child
  uint8_t* next = nullptr;            // [B, U, children]
};
Status calibration_descend(const DescendParams& params, cudaStream_t stream);

// counts[b, bin of scores[b, u, c]] += sizes[b, c] for all that is alive. kScoreBins counts a head,
// zero before. No unit's sizes may sum to 2^32.
Status calibration_record(const UnitScores& params, unsigned long long* counts,
                          cudaStream_t stream);

}  // namespace sqz::cuda
