#include "libruntime/session/query_blocks.h"

#include <algorithm>

#include "libruntime/attention/attend.h"

namespace sqz {

QueryBlocks::QueryBlocks(const ModelDescription& model, int64_t block, int64_t max_tokens,
                         bool before_rope, ThreadPool& pool)
    : block_(block),
      pool_(pool),
      rope_(model.rope, model.head_dim),
      finite_(static_cast<size_t>(max_tokens)) {
  const int64_t width =
      model.most([](const LayerGeometry& layer) { return layer.query_heads * layer.head_dim; });
  // Not touched until used, so that memory that a short call does not need costs nothing.
  converted_.reset(new float[static_cast<size_t>(max_tokens * width)]);
  if (before_rope) {
    before_rope_.reset(new float[static_cast<size_t>(max_tokens * width)]);
    angles_.reset(new float[static_cast<size_t>(pool.size() * model.head_dim)]);
  }
  blocks_.reserve(finite_.size());
  not_finite_.reserve(finite_.size());
}

Status QueryBlocks::load(const AttendCall& call, const LayerGeometry& layer, bool before_rope) {
  heads_ = layer.query_heads;
  dim_ = layer.head_dim;
  if (before_rope && call.q_before_rope == nullptr && call.positions == nullptr) {
    return {Code::kInvalidArgument,
            "positions: found null, expected the tokens' positions, or q_before_rope: the selector "
            "looks at queries before RoPE"};
  }
  const bool direct = call.dtype == DType::kF32;
  queries_ = direct ? static_cast<const float*>(call.q) : converted_.get();
  pool_.for_each(call.tokens, [&](int64_t token, int worker) {
    const int64_t at = row(token, 0), width = token_stride();
    const auto load_row = [&](const void* from, float* to) {
      const auto* bytes = static_cast<const std::byte*>(from) + at * dtype_size(call.dtype);
      return to_finite_floats(call.dtype, bytes, width, to);
    };
    bool finite = load_row(call.q, direct ? nullptr : converted_.get() + at);
    if (before_rope && call.q_before_rope != nullptr) {
      finite = load_row(call.q_before_rope, before_rope_.get() + at) && finite;
    } else if (before_rope) {
      rope_.apply(call.position(token), queries_ + at, heads_, angles_.get() + worker * dim_,
                  before_rope_.get() + at);
    }
    finite_[token] = finite ? 1 : 0;
  });
  blocks_.clear();
  not_finite_.clear();
  for (int64_t r = 0; r < call.request_count(); ++r) {
    const int64_t begin = call.request_begin(r), end = call.request_begin(r + 1);
    const auto flags = std::span(finite_).subspan(begin, end - begin);
    if (std::find(flags.begin(), flags.end(), 0) != flags.end()) {
      not_finite_.push_back({begin, end - begin});
      continue;
    }
    const int64_t step = block_ == 0 ? end - begin : block_;
    for (int64_t t = begin; t < end; t += step) blocks_.push_back({t, std::min(step, end - t)});
  }
  return {};
}

}  // namespace sqz
