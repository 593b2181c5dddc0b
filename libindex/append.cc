#include "libindex/append.h"

#include <algorithm>

#include "formats/base/hash.h"
#include "libindex/buckets.h"

namespace sqz {
namespace {

// Rows [Hkv, tokens, d] in token order, float32: of a layer of an index, stored as `slots` and
// `exact`, and behind them `fresh`, [Hkv, n, d]. Tokens that a layer with a sliding window has
// dropped are zero.
std::vector<float> in_token_order(const LayerView& view, const IndexMetadata& metadata,
                                  int64_t tokens, const void* slots, const void* exact,
                                  std::span<const float> fresh) {
  const int64_t d = view.head_dim, known = metadata.tokens, added = tokens - known;
  std::vector<float> out(static_cast<size_t>(view.kv_heads * tokens * d));
  const auto copy = [&](const void* from, int64_t row, float* to) {
    to_floats(static_cast<const uint16_t*>(from) + row * d, view.dtype, d, to);
  };
  for (int64_t head = 0; head < view.kv_heads; ++head) {
    float* to = out.data() + head * tokens * d;
    for (int64_t s = 0; s < view.slots; ++s) {
      const int64_t slot = head * view.slots + s;
      copy(slots, slot, to + int64_t{view.positions[slot]} * d);
    }
    for (int64_t e = 0; e < view.exact; ++e) {
      const bool sink = view.slots > 0 && e < metadata.sink;
      const int64_t token = sink ? e : known - view.exact + e;
      copy(exact, head * view.exact + e, to + token * d);
    }
    std::copy_n(fresh.data() + head * added * d, added * d, to + known * d);
  }
  return out;
}

}  // namespace

Status check_appendable(const SqzFile& index, std::span<const int32_t> tokens) {
  const IndexMetadata& metadata = index.metadata();
  if (metadata.partition != Partition::kBuckets) {
    return Refuse{index.path(), Code::kUnsupported}(
        "partition", partition_name(metadata.partition),
        "buckets (sqz-index build --qmodel): build others anew");
  }
  const auto known = static_cast<size_t>(metadata.tokens);
  if (tokens.size() <= known) {
    return Refuse{index.path()}(
        "all tokens", tokens.size(),
        concat("more than the ", known,
               " that it has: give its own texts first, then the new ones"));
  }
  const std::string hash = hex(xxh3_64(std::as_bytes(tokens.first(known))));
  if (hash == metadata.tokens_hash) return {};
  return Refuse{index.path(), Code::kMismatch}(
      concat("hash of the first ", known, " tokens"), hash,
      concat(metadata.tokens_hash, ": give the index's own texts first, then the new ones"));
}

BuildOptions options_of(const SqzFile& index, const QmodelFile& qmodel) {
  const IndexMetadata& metadata = index.metadata();
  BuildOptions out;
  out.partition = Partition::kBuckets;
  out.qmodel = &qmodel;
  out.sink = metadata.sink;
  out.tail = metadata.tail;
  out.dtype = metadata.dtype;
  out.calibrate_keys = metadata.key_calibration;
  out.heavy_hitters = metadata.heavy_hitters;
  out.layer_budgets = metadata.layer_budgets;
  const JsonDocument build = metadata.build.parsed();
  if (const JsonValue* pass = build.root().find("pass")) out.pass = pass->string();
  out.chat = metadata.chat;
  return out;
}

Result<std::unique_ptr<IndexAppender>> IndexAppender::create(
    Env& env, std::shared_ptr<const SqzFile> index, const std::string& output, bool replace,
    std::span<const int32_t> tokens, int threads) {
  const auto open = [&]() -> Result<std::unique_ptr<IndexAppender>> {
    SQZ_RETURN_IF_ERROR(check_appendable(*index, tokens));
    const IndexMetadata& metadata = index->metadata();
    if (metadata.heavy_hitters || metadata.key_calibration) {
      return Refuse{index->path(), Code::kUnsupported}(
          "contents", "heavy hitters or a calibration of single keys",
          "keys and values alone, to append to without a pass over all tokens");
    }
    SQZ_RETURN_IF_ERROR(index->check_whole({}, threads));
    auto out = std::make_unique<IndexAppender>();
    out->index_ = index;
    out->qmodel_ = embedded_qmodel(*index);
    out->tokens_ = std::ssize(tokens);
    BuildOptions options = options_of(*index, out->qmodel_);
    options.threads = threads;
    SQZ_ASSIGN_OR_RETURN(out->builder_,
                         IndexBuilder::create(env, output, replace, metadata.model, tokens,
                                              metadata.tokenizer_hash, options));
    return out;
  };
  return within_memory(open, "not enough memory to append to the index");
}

Status IndexAppender::add_layer(int64_t layer, std::span<const float> keys,
                                std::span<const float> values) {
  const IndexMetadata& metadata = index_->metadata();
  const ModelDescription& model = metadata.model;
  if (layer < 0 || layer >= model.layers) {
    return Refuse{"append", Code::kInvalidArgument}("layer", layer,
                                                    concat("0 to ", model.layers - 1));
  }
  const int64_t wanted = model.kv_heads * (tokens_ - metadata.tokens) * model.head_dim;
  for (const auto& [name, given] : {std::pair("keys", keys), std::pair("values", values)}) {
    if (std::cmp_equal(given.size(), wanted)) continue;
    return Refuse{concat("layer ", layer), Code::kInvalidArgument}(concat("floats of ", name),
                                                                   given.size(), wanted);
  }
  const auto add = [&] {
    const LayerView view = index_->layer(layer);
    const auto whole = [&](const void* slots, const void* exact, std::span<const float> fresh) {
      return in_token_order(view, metadata, tokens_, slots, exact, fresh);
    };
    const std::vector<float> all_keys = whole(view.keys, view.exact_keys, keys);
    const std::vector<float> all_values = whole(view.values, view.exact_values, values);
    return builder_->add_layer(layer, {all_keys, all_values, {}, nullptr});
  };
  return within_memory(add, "not enough memory for the keys of layer ", layer);
}

}  // namespace sqz
