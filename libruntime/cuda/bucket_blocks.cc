#include "libruntime/cuda/bucket_blocks.h"

#include <algorithm>
#include <bit>

#include "libruntime/cuda/cuda_status.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kStretchBytes = int64_t{128} << 20;

}  // namespace

Result<std::unique_ptr<BucketBlocks>> BucketBlocks::create(const BucketLookup& networks,
                                                           const ModelDescription& model,
                                                           std::span<const LookupParams> lookups,
                                                           int64_t max_tokens) {
  std::unique_ptr<BucketBlocks> out(new BucketBlocks(networks, model));
  for (int64_t l = 0; l < std::ssize(lookups); ++l) {
    const LookupParams& lookup = lookups[static_cast<size_t>(l)];
    if (lookup.levels == 0) continue;
    out->hidden_ = std::max<int64_t>(out->hidden_, networks.params_of(l, lookup).hidden);
    out->buckets_ = std::max<int64_t>(out->buckets_, lookup.level[0].clusters);
  }
  // Whole tiles of rows, whatever the group, tell what a token takes.
  out->tokens_ = kProductTile;
  const int64_t each = static_cast<int64_t>(out->lay_out(nullptr)) / kProductTile;
  const auto room = std::clamp<int64_t>(kStretchBytes / each, 1, kClassifyTokens);
  // Powers of two fill tiles.
  out->tokens_ =
      std::min(static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(room))), max_tokens);
  const size_t bytes = out->lay_out(nullptr);
  SQZ_RETURN_IF_ERROR(out->memory_.reserve(bytes));
  out->lay_out(out->memory_.data());
  return out;
}

// Everything; from null it only counts.
size_t BucketBlocks::lay_out(void* base) {
  const int64_t heads = model_.kv_heads, rows = classify_rows(tokens_, model_.group_size());
  Layout layout(base);
  const auto matrix = [&](int64_t columns) {
    SplitMatrix out;
    out.columns = static_cast<int32_t>(weight_columns(columns));
    out.stride = split_words(rows, columns);
    out.words = layout.take<uint4>(heads * out.stride);
    return out;
  };
  queries_ = matrix(model_.head_dim);
  units_ = matrix(hidden_);
  logits_ = layout.take<float>(heads * rows * weight_rows(buckets_) * kWeightRows);
  lse_ = layout.take<float>(heads * rows);
  return layout.used();
}

Status BucketBlocks::look_up(const AttendCall& call, const BlockWave& wave,
                             const PlainLookup& lookup) const {
  const ClassifyParams network = networks_.params_of(call.layer, lookup.token);
  BlockClassify classify;
  classify.lookup = lookup;
  classify.hidden = network.hidden;
  classify.hidden_weight = network.hidden_weight;
  classify.hidden_bias = network.hidden_bias;
  classify.output_weight = network.output_weight;
  classify.output_bias = network.output_bias;
  if (call.q_before_rope != nullptr) {
    classify.lookup.token.q =
        static_cast<const std::byte*>(call.q_before_rope) +
        wave.first * model_.query_heads * model_.head_dim * dtype_size(call.dtype);
  } else {
    classify.frequencies = networks_.frequencies();
    classify.shrink = networks_.shrink();
    classify.positions = call.positions + wave.first;
  }
  classify.tokens = static_cast<int32_t>(tokens_);
  classify.queries = queries_;
  classify.units = units_;
  classify.units.columns = static_cast<int32_t>(weight_columns(network.hidden));
  classify.logits = logits_;
  classify.lse = lse_;
  return block_classify(classify, static_cast<cudaStream_t>(call.stream));
}

}  // namespace sqz::cuda
