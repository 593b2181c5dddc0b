// Calibration: thresholds and shares for every budget, from the queries of the calibration tokens
// against the centroids as stored, scored by the runtime's own score_clusters().
//
// A cluster's score counts with its number of keys, over all (sparse layer, KV head, query).
// Thresholds are quantiles of that one distribution, so they are global, as in the paper (3.2).
// Scope 0 (generation) scores a query on its own, with the mean over the heads of its GQA group.
// Scope 1 (prompt) scores a block of queries together. Queries of the tail count in both scopes:
// each on its own, and all as one block. Of recorded calls of an engine those with one query count
// in scope 0 and those with several, each as one block, in scope 1, as they are served; calls weigh
// the same, whatever their length.
//
// The tree (path 1) is measured as it is served. T_1 is set so that the clusters of level 1 with
// S >= T_1 hold coarse_keep of all keys; level 2 is scored for their children alone, with the
// denominator of equation 3 over these; T_2 is set so that coarse_keep^2 of all keys remain; and so
// on. Keys that a coarser level dropped count as not kept. A fraction beyond what the coarser
// levels let through cannot be reached: its threshold is kBelowAllScores (libindex/quantile.h),
// which keeps all that came through, less than was asked. The runtime uses the flat path for such
// budgets.
//
// With one level the paths are the same. thresholds[..][0] is above and thresholds[..][kGrid - 1]
// below every finite score.
//
// Deterministic: the same bits for any number of threads.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz {

class CalibrationScorer;  // libindex/calibration_scorer.h

// One sparse layer, as it is in the file.
struct CalibrationLayer {
  struct Level {
    std::vector<std::byte> centroids;  // [Hkv, n_k, d] in `dtype`
    std::vector<uint32_t> children;    // [Hkv, n_k + 1]: the file's offsets
  };
  int64_t layer = 0;
  std::vector<Level> levels;   // coarse to fine
  std::vector<float> queries;  // [Hkv, n, group, d] after RoPE: see group_queries()
};

struct CalibrationInput {
  int64_t layers = 0;  // of the model; those that are not in `sparse` are dense
  int64_t kv_heads = 0, group = 0, dim = 0;
  int64_t queries = 0;         // n, per layer and query head
  std::vector<int64_t> calls;  // queries of each recorded call, in order, sum n; empty: the tail's
  float scale = 0;             // attention scale
  DType dtype = DType::kBF16;
  double coarse_keep = 0.5;  // of level 1; level k keeps its k-th power
  std::string source;        // for people: "tail"
  std::vector<CalibrationLayer> sparse;
};

// That of an index, without queries and layers.
CalibrationInput calibration_input(const IndexMetadata& metadata, std::string source);

// [Hq, n, d], or with `by_token` [n, Hq, d], to [Hkv, n, group, d], as they are scored.
std::vector<float> group_queries(const float* queries, int64_t kv_heads, int64_t group, int64_t n,
                                 int64_t dim, bool by_token = false);

// Queries that are scored together, once: one selection.
struct CalibrationUnit {
  int64_t first = 0, count = 0;
};
// The units of each scope. A scope that no call is of gets what there is: all queries one by one in
// scope 0, the single queries in scope 1. `calls` as in CalibrationInput, of `queries` in all.
std::array<std::vector<CalibrationUnit>, Calibration::kScopes> calibration_units(
    const std::vector<int64_t>& calls, int64_t queries);

// Without a sparse layer there is nothing to calibrate and all tables are empty. kNumeric, naming
// layer and KV head, where a logit is NaN or infinite. Memory: a sketch per scope, sparse layer and
// KV head (94 KB each) besides the input.
Result<Calibration> calibrate(const CalibrationInput& input, int threads);
// The same with another scorer than the CPU's, made for `input`.
Result<Calibration> calibrate(const CalibrationInput& input, CalibrationScorer& scorer);

}  // namespace sqz
