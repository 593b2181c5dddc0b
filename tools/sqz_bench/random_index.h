// Indexes of made-up keys for timing the selectors saap and quest; entries of keys and values are
// N(0, 1). saap: buckets with a query classifier; sizes of buckets vary like exp(N(0, 0.6)),
// weights of the networks are N(0, 1 / d) and N(0, 4 / H), so that some buckets get much of a
// query's attention. quest: pages of 16 tokens.
#pragma once

#include <memory>
#include <vector>

#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {

// One layer of `tokens` tokens for options.selector, with options.buckets buckets and
// options.hidden hidden units.
Result<std::unique_ptr<TemporaryFile>> make_random_index(const Options& options, int64_t tokens);

// `sets` sets of [tokens, Hq, d] queries, N(0, 1).
std::vector<std::vector<float>> random_queries(const ModelDescription& model, int64_t sets,
                                               int64_t tokens, uint64_t seed);

}  // namespace sqz::bench
