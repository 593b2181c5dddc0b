// An index of a model's own keys, for timing: those of a capture, tiled up to the shape of a larger
// model.
//
// KV heads are taken at even distances from all layers of the capture. Their first keys are
// clustered and ordered as a build does it; the layer then holds as many copies of these clusters,
// one after another, as make up the asked number of tokens. A vector of d dimensions is written
// head_dim / d times, so that cosines and, with queries scaled for it, logits are the model's.
// Sizes of clusters, lengths of runs and what the heads want differ as they do in the model.
// Queries are the capture's: every second one calibrates, the others are asked.
#pragma once

#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {

struct CapturedIndex {
  std::shared_ptr<const IndexFile> file;
  std::vector<std::vector<float>> queries;  // sets of [tokens, Hq, d]
};

// One layer of at most `tokens` tokens, as many as whole copies make, and sets of `query_tokens`
// queries that follow each other in the text. kInvalidArgument if the shape of the options is not a
// multiple of the capture's.
Result<CapturedIndex> make_captured_index(const Options& options, int64_t tokens, int64_t sets,
                                          int64_t query_tokens);

// Copies of contexts of at most `captured` tokens, without sink and tail, that make up `tokens`.
struct Tiling {
  int64_t copies = 1;
  int64_t slots = 0;  // of a copy
};
Tiling tiling(int64_t tokens, int64_t captured);

}  // namespace sqz::bench
