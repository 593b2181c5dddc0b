// An index of made-up keys, for timing: no model and no k-means, so that a layer of 128K tokens is
// there in seconds.
//
// The keys of a KV head scatter around fine centres, these around coarse ones, as k-means would
// have found them: key = coarse + 0.6 fine + 0.6 noise, entries N(0, 1); values are N(0, 1). There
// are 5 % as many fine centres as tokens and 1 % coarse ones; sizes vary like exp(N(0, 0.6)). A
// query is a mixture of 4 coarse centroids of its KV head, plus noise: its best keys have logits 4
// to 6 above the mean, and lie together, so that selections have the runs that real ones have.
// Calibrated by libindex, with 32 such queries a head.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {

// One layer of `tokens` tokens.
Result<std::unique_ptr<TemporaryFile>> make_synthetic_index(const Options& options, int64_t tokens);

// `sets` sets of [tokens, Hq, d] such queries for the layer of any index with two levels.
std::vector<std::vector<float>> synthetic_queries(const LayerView& layer, int64_t group,
                                                  int64_t sets, int64_t tokens, uint64_t seed);

// Clusters per level, coarse to fine.
std::vector<int64_t> synthetic_clusters(int64_t tokens, int64_t slots);

}  // namespace sqz::bench
