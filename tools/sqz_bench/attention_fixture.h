// What the contenders of `attend` and `prefill` share: an index with one layer, and queries.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "libruntime/session/serving_session.h"
#include "tools/sqz_bench/made_index.h"
#include "tools/sqz_bench/measure.h"

namespace sqz::bench {

struct Fixture {
  std::unique_ptr<TemporaryFile> file;  // first: it outlives the mapping; null for --index
  std::shared_ptr<const ServedIndex> served;
  std::string keys;                               // where they come from, for people
  int64_t tokens = 0;                             // of a call
  std::vector<int64_t> indptr;                    // of its requests; empty = one
  DType dtype = DType::kBF16;                     // of queries and outputs
  bool before_rope = false;                       // queries are those before RoPE, too
  std::vector<std::vector<float>> exact_queries;  // sets of [tokens, Hq, d]
  std::vector<std::vector<std::byte>> queries;    // the same in `dtype`

  const LayerView& layer() const { return served->layers[0]; }
  int64_t query_heads() const { return served->metadata().model.query_heads; }
  // Of keys and values, and of dense attention to them by all tokens.
  double kv_bytes() const;
  double dense_flop() const;
  // A call with the queries of a set; out and lse are left to fill in.
  AttendCall call(int64_t set) const;
};

// One way to serve; levels 0 is dense.
struct Setting {
  int levels = 0;
  double sparsity = 0;
  int64_t block = 0;
  std::string name;
};
// Dense, then every combination of --block, --sparsity and --levels.
std::vector<Setting> settings_of(const Options& options, bool blocks);
SessionOptions session_of(const Options& options, const Fixture& fixture, const Setting& setting);

// An index of `tokens` tokens, or --index, or one of --capture, and `sets` sets of queries: of one
// request, or of one a token.
Result<std::shared_ptr<const Fixture>> make_fixture(const Options& options, int64_t tokens,
                                                    int64_t query_tokens, bool requests,
                                                    int64_t sets);
JsonMembers shape_of(const Fixture& fixture, const Options& options);

}  // namespace sqz::bench
