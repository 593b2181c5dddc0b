// The queries of a call, in float32, and its blocks: tokens that share a selection. A block never
// has tokens of two requests.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "libruntime/rope.h"
#include "libruntime/session/bad_row.h"
#include "libruntime/session/serving_session.h"
#include "libruntime/session/thread_pool.h"

namespace sqz {

struct QueryBlock {
  int64_t first = 0, tokens = 0;
};

class QueryBlocks {
 public:
  // block: most tokens of a block; 0 = all of a request. at_once: most blocks of next().
  // before_rope: a selector wants the queries from before RoPE, too.
  QueryBlocks(const ModelDescription& model, int64_t block, int64_t at_once, int64_t max_tokens,
              bool before_rope, ThreadPool& pool);

  // Takes the first `tokens` tokens of a call, whose blocks next() then gives from the first on.
  // kNumeric if a query is NaN or infinite.
  Status load(const AttendCall& call, int64_t tokens);
  // Once loaded: the same queries from before RoPE, from the caller or turned back by positions.
  Status load_before_rope(const AttendCall& call, int64_t tokens);

  // The next blocks of the call; none at its end.
  std::span<const QueryBlock> next(const AttendCall& call);
  // The same with one block of all tokens, of a call that selects nothing.
  std::span<const QueryBlock> next_whole(const AttendCall& call);
  std::optional<QueryBlock> first(const AttendCall& call) const;
  // All blocks of a call.
  int64_t count(const AttendCall& call) const;

  const float* query(int64_t token, int64_t head) const { return queries_ + row(token, head); }
  const float* query_before_rope(int64_t token, int64_t head) const {
    return before_rope_.get() + row(token, head);
  }
  int64_t token_stride() const { return heads_ * dim_; }  // in floats

 private:
  // Where the next block begins.
  struct Cursor {
    int64_t request = 0, token = 0;
  };
  bool next_block(const AttendCall& call, Cursor& cursor, QueryBlock& block) const;
  int64_t row(int64_t token, int64_t head) const { return (token * heads_ + head) * dim_; }

  const int64_t heads_, dim_, block_, at_once_;
  ThreadPool& pool_;
  RopeUndo rope_;
  // [max_tokens, Hq, d]
  const float* queries_ = nullptr;  // the caller's, or converted_
  std::unique_ptr<float[]> converted_;
  std::unique_ptr<float[]> before_rope_;
  std::unique_ptr<float[]> angles_;  // [threads, d]
  std::vector<QueryBlock> blocks_;
  Cursor cursor_;
  BadRow bad_;
};

}  // namespace sqz
