// The queries of a call, in float32, and its blocks: tokens that share a selection. A block never
// has tokens of two requests.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "libruntime/rope.h"
#include "libruntime/session/serving_session.h"
#include "libruntime/session/thread_pool.h"

namespace sqz {

struct QueryBlock {
  int64_t first = 0, tokens = 0;
};

class QueryBlocks {
 public:
  // block: most tokens of a block; 0 = all of a request. before_rope: a selector wants the queries
  // from before RoPE, too.
  QueryBlocks(const ModelDescription& model, int64_t block, int64_t max_tokens, bool before_rope,
              ThreadPool& pool);

  // Takes the queries of a call to a layer; those from before RoPE are the caller's, or turned back
  // by positions. kInvalidArgument if they are wanted and the call has neither.
  Status load(const AttendCall& call, const LayerGeometry& layer, bool before_rope);

  // Of the requests whose queries are all finite.
  std::span<const QueryBlock> blocks() const { return blocks_; }
  // The other requests, whole.
  std::span<const QueryBlock> not_finite() const { return not_finite_; }

  const float* query(int64_t token, int64_t head) const { return queries_ + row(token, head); }
  const float* query_before_rope(int64_t token, int64_t head) const {
    return before_rope_.get() + row(token, head);
  }
  int64_t token_stride() const { return heads_ * dim_; }  // in floats

 private:
  int64_t row(int64_t token, int64_t head) const { return (token * heads_ + head) * dim_; }

  const int64_t block_;
  int64_t heads_ = 0, dim_ = 0;  // of the layer
  ThreadPool& pool_;
  RopeUndo rope_;
  // [max_tokens, Hq, d]; the memory is that of the largest layer
  const float* queries_ = nullptr;  // the caller's, or converted_
  std::unique_ptr<float[]> converted_;
  std::unique_ptr<float[]> before_rope_;
  std::unique_ptr<float[]> angles_;  // [threads, d]
  std::vector<uint8_t> finite_;      // [max_tokens]
  std::vector<QueryBlock> blocks_, not_finite_;
};

}  // namespace sqz
