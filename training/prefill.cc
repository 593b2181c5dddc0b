#include <algorithm>

#include "training/model_runner.h"

namespace sqz::training {
namespace {

// The positions of an ascending list that are in [first, last): the place of the first one in the
// list, and their offsets from `first`.
struct Hits {
  int64_t start;
  at::Tensor offsets;  // int64
};
Hits hits(const std::vector<int64_t>& positions, int64_t first, int64_t last, at::Device device) {
  const auto begin = std::lower_bound(positions.begin(), positions.end(), first);
  const auto end = std::lower_bound(begin, positions.end(), last);
  at::Tensor offsets = at::empty({end - begin}, at::kLong);
  std::transform(begin, end, offsets.data_ptr<int64_t>(), [&](int64_t p) { return p - first; });
  return {begin - positions.begin(), offsets.to(device)};
}

// Collects a layer's capture for the consumer, block by block, on the host.
class Collector final : public LayerObserver {
 public:
  // on_device: keys and values stay in the cache.
  Collector(const ModelDescription& model, const PrefillOptions& options, int64_t tokens,
            bool on_device)
      : model_(model), options_(options), on_device_(on_device) {
    if (!options.consumer) return;
    const auto kv = [&](bool wanted) {
      return at::empty({wanted ? model.kv_heads : 0, tokens, model.head_dim});
    };
    const auto queries = static_cast<int64_t>(options.query_positions.size());
    const auto q = [&](bool wanted) {
      return at::empty({wanted ? model.query_heads : 0, queries, model.head_dim});
    };
    keys_ = kv(!on_device);
    values_ = kv(!on_device);
    keys_pre_rope_ = kv(options.pre_rope);
    queries_ = q(true);
    queries_pre_rope_ = q(options.pre_rope);
    cosine_ = at::empty({options.cosine ? tokens : 0});
  }

  // Before a layer: `like` is on the model's device.
  void begin(int64_t tokens, const at::Tensor& like) {
    if (!options_.consumer || !options_.attention) return;
    all_queries_ = at::empty({tokens, model_.query_heads, model_.head_dim}, like.options());
    all_keys_ = at::empty({tokens, model_.kv_heads, model_.head_dim}, like.options());
  }

  void projected(int64_t first, const at::Tensor& x, const Projection& projection) override {
    if (!options_.consumer) return;
    if (options_.attention) {
      all_queries_.narrow(0, first, x.size(0)).copy_(projection.q);
      all_keys_.narrow(0, first, x.size(0)).copy_(projection.k);
    }
    if (!on_device_) {
      copy_heads(keys_, first, projection.k);
      copy_heads(values_, first, projection.v);
    }
    const Hits wanted = hits(options_.query_positions, first, first + x.size(0), x.device());
    copy_heads(queries_, wanted.start, projection.q.index_select(0, wanted.offsets));
    if (!options_.pre_rope) return;
    copy_heads(keys_pre_rope_, first, projection.k_pre_rope);
    copy_heads(queries_pre_rope_, wanted.start,
               projection.q_pre_rope.index_select(0, wanted.offsets));
  }

  void attended(int64_t first, const at::Tensor& before, const at::Tensor& delta) override {
    if (!wants_cosine()) return;
    const at::Tensor x = before.to(at::kFloat);
    cosine_.narrow(0, first, x.size(0)).copy_(at::cosine_similarity(x, x + delta, 1));
  }

  Status hand_over(int64_t layer, const KvCache& cache) const {
    if (!options_.consumer) return {};
    LayerCapture capture;
    capture.layer = layer;
    DeviceRows rows;
    if (on_device_) {
      rows = device_rows(cache.keys(), cache.values());
      capture.device = &rows;
    }
    capture.keys = view(keys_);
    capture.values = view(values_);
    capture.keys_pre_rope = view(keys_pre_rope_);
    capture.queries = view(queries_);
    capture.queries_pre_rope = view(queries_pre_rope_);
    capture.cosine = view(cosine_);
    at::Tensor attention;
    if (options_.attention) {
      attention = attention_mass(all_queries_, all_keys_, model_,
                                 model_.sliding_window[static_cast<size_t>(layer)]);
      capture.attention = view(attention);
    }
    return options_.consumer(capture);
  }

 private:
  static DeviceRows device_rows(const at::Tensor& keys, const at::Tensor& values) {
    // Reading an element waits for all earlier work of the stream.
    values.select(0, 0).select(0, 0).select(0, 0).item();
    return {keys.data_ptr(), values.data_ptr(),
            keys.scalar_type() == at::kBFloat16 ? DType::kBF16 : DType::kF32, keys.stride(0),
            static_cast<int>(keys.get_device())};
  }
  bool wants_cosine() const { return options_.consumer && options_.cosine; }
  // rows: [T, heads, d] -> to[:, first .. first + T].
  static void copy_heads(const at::Tensor& to, int64_t first, const at::Tensor& rows) {
    to.narrow(1, first, rows.size(0)).copy_(rows.transpose(0, 1));
  }
  static std::span<const float> view(const at::Tensor& tensor) {
    return {tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel())};
  }

  const ModelDescription& model_;
  const PrefillOptions& options_;
  const bool on_device_;
  at::Tensor all_queries_, all_keys_;  // [N, heads, d] of the layer at hand, on the model's device
  at::Tensor keys_, values_, keys_pre_rope_, queries_, queries_pre_rope_, cosine_;
};

Status dense_pass(const Transformer& transformer, std::span<const int32_t> tokens,
                  const PrefillOptions& options) {
  const ModelDescription& model = transformer.config().description;
  const auto count = static_cast<int64_t>(tokens.size());
  Collector collector(model, options, count, options.on_device && !transformer.device().is_cpu());
  const auto cache = transformer.make_cache();
  Step step;
  step.x = transformer.embed(tokens);
  step.rope = transformer.rope(0, count);
  step.block = options.chunk > 0               ? options.chunk
               : transformer.device().is_cpu() ? kDefaultChunk
                                               : kGpuChunk;
  step.context = options.context;
  step.observer = &collector;
  step.last_output = options.consumer && options.cosine;
  collector.begin(count, step.x);
  KvCache* const caches[] = {cache.get()};
  for (int64_t l = 0; l < model.layers; ++l) {
    cache->resize(0);
    SQZ_RETURN_IF_ERROR(transformer.run_layer(l, step, caches));
    SQZ_RETURN_IF_ERROR(collector.hand_over(l, *cache));
    if (options.progress) {
      options.progress(static_cast<double>(l + 1) / static_cast<double>(model.layers));
    }
  }
  return {};
}

}  // namespace

Status ModelRunner::prefill(std::span<const int32_t> tokens, const PrefillOptions& options) {
  return guarded([&]() -> Status {
    SQZ_RETURN_IF_ERROR(check_tokens(config().description, tokens, 0));
    return dense_pass(transformer_, tokens, options);
  });
}

}  // namespace sqz::training
