#include "libruntime/session/query_blocks.h"

#include <algorithm>

#include "libruntime/attention/attend.h"

namespace sqz {

QueryBlocks::QueryBlocks(const ModelDescription& model, int64_t block, int64_t at_once,
                         int64_t max_tokens, bool before_rope, ThreadPool& pool)
    : heads_(model.query_heads),
      dim_(model.head_dim),
      block_(block),
      at_once_(at_once),
      pool_(pool),
      rope_(model.rope, model.head_dim) {
  // Not touched until used, so that memory that a short call does not need costs nothing.
  converted_.reset(new float[static_cast<size_t>(max_tokens * heads_ * dim_)]);
  if (before_rope) {
    before_rope_.reset(new float[static_cast<size_t>(max_tokens * heads_ * dim_)]);
    angles_.reset(new float[static_cast<size_t>(pool.size() * dim_)]);
  }
  blocks_.reserve(static_cast<size_t>(at_once));
}

Status QueryBlocks::load(const AttendCall& call, int64_t tokens) {
  cursor_ = {};
  const bool direct = call.dtype == DType::kF32;
  queries_ = direct ? static_cast<const float*>(call.q) : converted_.get();
  bad_.reset();
  pool_.for_each(tokens, [&](int64_t token, int) {
    for (int64_t head = 0; head < heads_; ++head) {
      const int64_t at = row(token, head);
      const auto* from = static_cast<const std::byte*>(call.q) + at * dtype_size(call.dtype);
      float* to = direct ? nullptr : converted_.get() + at;
      if (!to_finite_floats(call.dtype, from, dim_, to)) bad_.note(token * heads_ + head);
    }
  });
  return bad_.status("query", call.layer, heads_);
}

Status QueryBlocks::load_before_rope(const AttendCall& call, int64_t tokens) {
  if (call.q_before_rope == nullptr && call.positions == nullptr) {
    return {Code::kInvalidArgument,
            "positions: found null, expected the tokens' positions, or q_before_rope: the selector "
            "looks at queries before RoPE"};
  }
  bad_.reset();
  pool_.for_each(tokens, [&](int64_t token, int worker) {
    const int64_t at = row(token, 0);
    float* to = before_rope_.get() + at;
    if (call.q_before_rope == nullptr) {
      float* angles = angles_.get() + worker * dim_;
      rope_.apply(call.positions[token], queries_ + at, heads_, angles, to);
      return;
    }
    const auto* from =
        static_cast<const std::byte*>(call.q_before_rope) + at * dtype_size(call.dtype);
    if (!to_finite_floats(call.dtype, from, heads_ * dim_, to)) bad_.note(token * heads_);
  });
  return bad_.status("query before RoPE", call.layer, heads_);
}

bool QueryBlocks::next_block(const AttendCall& call, Cursor& cursor, QueryBlock& block) const {
  const int64_t requests = call.request_count();
  const auto end_of = [&](int64_t request) { return call.request_begin(request + 1); };
  while (cursor.request < requests && cursor.token == end_of(cursor.request)) ++cursor.request;
  if (cursor.request == requests) return false;
  const int64_t left = end_of(cursor.request) - cursor.token;
  block = {cursor.token, block_ == 0 ? left : std::min(block_, left)};
  cursor.token += block.tokens;
  return true;
}

std::span<const QueryBlock> QueryBlocks::next(const AttendCall& call) {
  blocks_.clear();
  for (QueryBlock block; std::ssize(blocks_) < at_once_ && next_block(call, cursor_, block);) {
    blocks_.push_back(block);
  }
  return blocks_;
}

std::span<const QueryBlock> QueryBlocks::next_whole(const AttendCall& call) {
  blocks_.clear();
  if (cursor_.token < call.tokens) blocks_.push_back({0, call.tokens});
  cursor_.token = call.tokens;
  return blocks_;
}

std::optional<QueryBlock> QueryBlocks::first(const AttendCall& call) const {
  Cursor cursor;
  QueryBlock block;
  return next_block(call, cursor, block) ? std::optional(block) : std::nullopt;
}

int64_t QueryBlocks::count(const AttendCall& call) const {
  Cursor cursor;
  QueryBlock block;
  int64_t count = 0;
  while (next_block(call, cursor, block)) ++count;
  return count;
}

}  // namespace sqz
