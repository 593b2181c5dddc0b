// What `attend` and `prefill` share on the CPU and on a GPU: an index with one layer, queries, and
// the ways to serve them.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libruntime/session/serving_session.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {

// What a case asks for where options do not say.
struct AttentionCase {
  bool requests = false;     // a request a query token, and plain reads beside; else one prompt
  int64_t tokens = 0;        // of the index, if it is made
  int64_t query_tokens = 0;  // of a call
  int64_t rounds = 0;
  int64_t sets = 0;  // of queries
};

struct Fixture {
  std::shared_ptr<const IndexFile> file;  // first: it outlives the mapping; null for --index
  std::shared_ptr<const ServedIndex> served;
  std::shared_ptr<const IndexFile> whole_file;
  std::shared_ptr<const ServedIndex> whole;       // the same with keys and values of 16 bits
  std::string keys;                               // where they come from, for people
  int64_t tokens = 0;                             // of a call
  std::vector<int64_t> indptr;                    // of its requests; empty = one
  DType dtype = DType::kBF16;                     // of queries and outputs
  bool before_rope = false;                       // queries are those before RoPE, too
  std::vector<std::vector<float>> exact_queries;  // sets of [tokens, Hq, d]
  std::vector<std::vector<std::byte>> queries;    // the same in `dtype`

  const LayerView& layer() const { return served->layers[0]; }
  int64_t query_heads() const { return served->metadata().model.query_heads; }
  // Whether every token is a request of its own.
  bool tokens_apart() const { return tokens == 1 || !indptr.empty(); }
  // Bytes of the clustered keys, which are as many as those of their values.
  size_t key_bytes() const;
  // Multiplications and additions of dense attention to all keys by all tokens.
  double dense_flop() const;
  // A call with the queries at q; out and lse are left to fill in.
  AttendCall call(const void* q) const;
};

// Where the clustered keys and values of a LayerView or a cuda::DeviceLayer are, of whatever bits.
template <class Layer>
std::array<const void*, 2> stored_rows(const Layer& layer) {
  if (layer.coded_keys.bits > 0) return {layer.coded_keys.codes, layer.coded_values.codes};
  return {layer.keys, layer.values};
}

// An index made for the case, or --index, or one of --capture, with queries.
Result<std::shared_ptr<const Fixture>> make_fixture(const Options& options,
                                                    const AttentionCase& what);

// Dense attention over `whole` by the CPU, for the first `sets` sets of queries: outputs.
Result<std::vector<std::vector<float>>> dense_outputs(const Fixture& fixture, int threads,
                                                      size_t sets);
// Numbers of the fixture's dtype.
std::vector<float> widened(const std::vector<std::byte>& from, DType dtype);

// One way to use the fixture.
struct Setting {
  enum Kind { kRead, kDense, kSparse };
  Kind kind = kDense;
  std::string name;
  int levels = 0;
  double sparsity = 0;
  int64_t block = 0;
};
SessionOptions session_of(const Options& options, const Fixture& fixture, const Setting& setting);

// The case with a contender for each setting: plain reads, dense, then every combination of
// --block,
// --sparsity and --levels. `place` is the contender's number.
using MakeContender = std::function<Result<Contender>(const Setting& setting, int place)>;
Result<CaseSetup> attention_setup(const Fixture& fixture, const Options& options,
                                  const AttentionCase& what, const MakeContender& make);

// What selection came to in `calls` calls: fractions of keys and bytes, and selections a call.
JsonMembers delivered(const Counters& counters, int64_t calls);
// The mean length of the runs that a call selects; 0 if there are none.
double keys_per_run(ServingSession& session, const AttendCall& call);

// Dense attention of the fixture's queries to all keys of its layer (slots and exact keys), once
// per dtype of options.torch_dtype: "torch bmm" is two matrix products with a softmax between them,
// "torch sdpa" scaled_dot_product_attention (from LibTorch 2 on). The heads of a group are rows of
// one product, so that keys are not repeated. One set of queries a round, in turn. Keys and values
// are copied. Built without LibTorch, there are no contenders.
std::vector<Contender> torch_contenders(const Options& options, const Fixture& fixture);

}  // namespace sqz::bench
