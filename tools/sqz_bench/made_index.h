// Indexes of one layer that are made for timing. No model and no k-means runs, so that 128K tokens
// take seconds.
//
// squeezed: the keys of a KV head scatter around fine centres, and these around coarse centres, as
// if k-means had found them: key = coarse + 0.6 fine + 0.6 noise, with entries N(0, 1). Values are
// N(0, 1). The index has 5 % as many fine clusters as tokens and 1 % coarse ones; their sizes vary
// like exp(N(0, 0.6)). A query is a mixture of 4 coarse centroids of its KV head, plus noise: its
// best keys have logits 4 to 6 above the mean, and lie together, so that selected keys come in runs
// as in a real index. 32 such queries calibrate the index.
//
// saap, quest: keys, values and queries are N(0, 1). saap has buckets whose sizes vary like those
// of clusters, and a classifier with weights N(0, 1 / d) and N(0, 4 / H), so that some buckets get
// much of a query's attention. quest has pages of 16 tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/random.h"
#include "formats/sqz_file.h"

namespace sqz::bench {

inline constexpr int64_t kSink = 16, kTail = 100;

// The default shape is one layer of Llama-3.1-8B over 128K tokens.
struct MadeIndex {
  std::string selector = "squeezed";  // that it is made for: squeezed, saap or quest
  int64_t tokens = 131072, query_heads = 32, kv_heads = 8, head_dim = 128;
  int64_t buckets = 1024;  // of saap, and hidden units of its classifier
  uint64_t seed = 0;
  int threads = 1;

  int64_t slots() const { return tokens - kSink - kTail; }
};

// The sum of four uniform numbers as one of N(0, 1): fast, and the same everywhere.
inline float normal(Random& random) {
  const uint64_t bits = random.next();
  const auto sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return (static_cast<float>(sum) * 0x1p-16f - 2.0f) * 1.7320508f;
}

// kExists if `path` is there.
Status make_index(const MadeIndex& made, const std::string& path);

// `sets` sets of [tokens, Hq, d] queries for layer 0 of an index, whether it was made here or not.
std::vector<std::vector<float>> make_queries(const SqzFile& file, int64_t sets, int64_t tokens,
                                             uint64_t seed);

}  // namespace sqz::bench
