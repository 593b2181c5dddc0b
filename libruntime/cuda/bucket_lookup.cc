#include "libruntime/cuda/bucket_lookup.h"

#include <algorithm>
#include <bit>

#include "libruntime/cuda/call_parts.h"
#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kStretchBytes = int64_t{128} << 20;

}  // namespace

BucketLookup::BucketLookup(const ServerSetup& setup)
    : setup_(setup), rope_(setup.model().rope, setup.model().head_dim) {}

Result<std::unique_ptr<BucketLookup>> BucketLookup::create(const ServerSetup& setup) {
  std::unique_ptr<BucketLookup> out(new BucketLookup(setup));
  const std::vector<float>& frequencies = out->rope_.frequencies();
  SQZ_RETURN_IF_ERROR(out->frequencies_.reserve(frequencies.size() * sizeof(float)));
  SQZ_RETURN_IF_ERROR(write_device(static_cast<float*>(out->frequencies_.data()), frequencies));
  for (int64_t l = 0; l < std::ssize(setup.lookups); ++l) {
    const LookupParams& lookup = setup.lookups[static_cast<size_t>(l)];
    if (lookup.levels == 0) continue;
    out->hidden_ = std::max<int64_t>(out->hidden_, setup.uploaded->layer(l).classifier.hidden);
    out->buckets_ = std::max<int64_t>(out->buckets_, lookup.level[0].clusters);
  }
  // Whole tiles of rows, whatever the group, tell what a token takes.
  out->tokens_ = kProductTile;
  const int64_t each = static_cast<int64_t>(out->lay_out(nullptr)) / kProductTile;
  const auto room = std::clamp<int64_t>(kStretchBytes / each, 1, kClassifyTokens);
  // Powers of two fill tiles.
  out->tokens_ =
      std::min(static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(room))), setup.max_tokens);
  SQZ_RETURN_IF_ERROR(take_memory(out->memory_, [&](void* base) { return out->lay_out(base); }));
  return out;
}

size_t BucketLookup::lay_out(void* base) {
  const int64_t heads = setup_.model().kv_heads;
  const int64_t rows = classify_rows(tokens_, setup_.model().group_size());
  Layout layout(base);
  const auto matrix = [&](int64_t columns) {
    SplitMatrix out;
    out.columns = static_cast<int32_t>(weight_columns(columns));
    out.stride = split_words(rows, columns);
    out.words = layout.take<uint4>(heads * out.stride);
    return out;
  };
  queries_ = matrix(setup_.model().head_dim);
  units_ = matrix(hidden_);
  logits_ = layout.take<float>(heads * rows * weight_rows(buckets_) * kWeightRows);
  lse_ = layout.take<float>(heads * rows);
  return layout.used();
}

Status BucketLookup::check(const AttendCall& call) {
  if (call.q_before_rope != nullptr || call.positions != nullptr) return {};
  return {Code::kInvalidArgument,
          "positions: found null, expected the tokens' positions, or q_before_rope: the selector "
          "looks at queries before RoPE"};
}

Status BucketLookup::look_up(const AttendCall& call, const BlockChunk& chunk,
                             const PrefillLookup& lookup, float* scores) const {
  BlockClassify classify;
  classify.lookup = lookup;
  classify.device = setup_.device;
  classify.scores = scores;
  classify.network = setup_.uploaded->layer(call.layer).classifier;
  if (call.q_before_rope != nullptr) {
    classify.lookup.queries =
        static_cast<const std::byte*>(call.q_before_rope) + query_bytes(call, chunk.first);
  } else {
    classify.frequencies = static_cast<const float*>(frequencies_.data());
    classify.shrink = rope_.shrink();
    classify.positions = call.positions + chunk.first;
    classify.offset = call.offset;
  }
  classify.tokens = static_cast<int32_t>(tokens_);
  classify.queries = queries_;
  classify.units = units_;
  classify.units.columns = static_cast<int32_t>(weight_columns(classify.network.hidden));
  classify.logits = logits_;
  classify.lse = lse_;
  return block_classify(classify, static_cast<cudaStream_t>(call.stream));
}

}  // namespace sqz::cuda
