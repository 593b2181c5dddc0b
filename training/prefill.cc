#include <algorithm>

#include "training/model_runner.h"

namespace sqz::training {
namespace {

Status check_positions(const std::vector<int64_t>& positions, const char* what, int64_t tokens) {
  int64_t previous = -1;
  for (int64_t position : positions) {
    if (position <= previous || position >= tokens) {
      return {Code::kInvalidArgument, concat(what, ": found ", position, " after ", previous,
                                             ", expected ascending positions below ", tokens)};
    }
    previous = position;
  }
  return {};
}

// The positions of an ascending list that lie in [first, last): where they start in the list, and
// their offsets from `first`.
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

// Collects what the consumer sees of one layer, chunk by chunk, on the host.
class Collector {
 public:
  Collector(const ModelDescription& model, const PrefillOptions& options, int64_t tokens)
      : model_(model), options_(options) {
    if (!options.consumer) return;
    const auto kv = [&](bool wanted) {
      return at::empty({wanted ? model.kv_heads : 0, tokens, model.head_dim});
    };
    const auto queries = static_cast<int64_t>(options.query_positions.size());
    const auto q = [&](bool wanted) {
      return at::empty({wanted ? model.query_heads : 0, queries, model.head_dim});
    };
    keys_ = kv(true);
    values_ = kv(true);
    keys_pre_rope_ = kv(options.pre_rope);
    queries_ = q(true);
    queries_pre_rope_ = q(options.pre_rope);
    hidden_ = at::empty({options.hidden ? tokens : 0, model.hidden_size});
    cosine_ = at::empty({options.cosine ? tokens : 0});
  }

  void add_hidden(const at::Tensor& x, int64_t first) {
    if (hidden_.defined() && options_.hidden) hidden_.narrow(0, first, x.size(0)).copy_(x);
  }

  void add(const LayerTaps& taps, int64_t first, int64_t count) {
    if (!options_.consumer) return;
    copy_heads(keys_, first, taps.keys);
    copy_heads(values_, first, taps.values);
    const Hits wanted = hits(options_.query_positions, first, first + count, taps.queries.device());
    copy_heads(queries_, wanted.start, taps.queries.index_select(0, wanted.offsets));
    if (options_.pre_rope) {
      copy_heads(keys_pre_rope_, first, taps.keys_pre_rope);
      copy_heads(queries_pre_rope_, wanted.start,
                 taps.queries_pre_rope.index_select(0, wanted.offsets));
    }
    if (options_.cosine) cosine_.narrow(0, first, count).copy_(taps.cosine);
  }

  Status hand_over(int64_t layer) const {
    if (!options_.consumer) return {};
    LayerCapture capture;
    capture.layer = layer;
    capture.keys = view(keys_);
    capture.values = view(values_);
    capture.keys_pre_rope = view(keys_pre_rope_);
    capture.queries = view(queries_);
    capture.queries_pre_rope = view(queries_pre_rope_);
    capture.hidden = view(hidden_);
    capture.cosine = view(cosine_);
    return options_.consumer(capture);
  }

 private:
  // rows: [T, heads, d] -> to[:, first .. first + T].
  static void copy_heads(at::Tensor& to, int64_t first, const at::Tensor& rows) {
    to.narrow(1, first, rows.size(0)).copy_(rows.transpose(0, 1));
  }
  static std::span<const float> view(const at::Tensor& tensor) {
    return {tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel())};
  }

  const ModelDescription& model_;
  const PrefillOptions& options_;
  at::Tensor keys_, values_, keys_pre_rope_, queries_, queries_pre_rope_, hidden_, cosine_;
};

// The pass itself; see training/runner.h.
class DensePass {
 public:
  DensePass(const Transformer& transformer, const PrefillOptions& options,
            std::span<const int32_t> tokens)
      : transformer_(transformer),
        model_(transformer.config().description),
        options_(options),
        tokens_(static_cast<int64_t>(tokens.size())),
        chunk_(options.chunk > 0 ? options.chunk : kDefaultChunk),
        x_(transformer.embed(tokens)),
        rope_(transformer.rope(0, tokens_)),
        cache_(transformer.make_cache()),
        collector_(model_, options, tokens_) {}

  Status run() {
    for (int64_t l = 0; l < model_.layers; ++l) {
      cache_->clear();
      for (int64_t first = 0; first < tokens_; first += chunk_) {
        SQZ_RETURN_IF_ERROR(run_chunk(l, first, std::min(chunk_, tokens_ - first)));
      }
      SQZ_RETURN_IF_ERROR(collector_.hand_over(l));
    }
    return {};
  }

  Result<std::vector<float>> logits() const {
    if (options_.logit_positions.empty()) return std::vector<float>();
    const at::Tensor rows =
        x_.index_select(0, hits(options_.logit_positions, 0, tokens_, x_.device()).offsets);
    const at::Tensor out = transformer_.logits(rows).contiguous();
    SQZ_RETURN_IF_ERROR(check_finite(out, 0));
    const float* data = out.data_ptr<float>();
    return std::vector<float>(data, data + out.numel());
  }

 private:
  Status run_chunk(int64_t l, int64_t first, int64_t count) {
    at::Tensor x = x_.narrow(0, first, count);
    collector_.add_hidden(x, first);
    LayerTaps taps;
    taps.want_pre_rope = options_.consumer && options_.pre_rope;
    taps.want_cosine = options_.consumer && options_.cosine;
    const auto& wanted = options_.logit_positions;
    const auto next = std::lower_bound(wanted.begin(), wanted.end(), first);
    const bool logits_here = next != wanted.end() && *next < first + count;
    const bool keys_only = l + 1 == model_.layers && !logits_here && !taps.want_cosine;
    SQZ_RETURN_IF_ERROR(
        transformer_.step(l, x, rope_.narrow(first, count), *cache_, {}, &taps, keys_only));
    collector_.add(taps, first, count);
    if (options_.progress) report_progress(l, first + count);
    return {};
  }

  // Attention over `done` tokens costs about their square, everything else is linear.
  void report_progress(int64_t l, int64_t done) const {
    const double part = static_cast<double>(done) / static_cast<double>(tokens_);
    const double layer = 0.5 * (part + part * part);
    options_.progress((static_cast<double>(l) + layer) / static_cast<double>(model_.layers));
  }

  const Transformer& transformer_;
  const ModelDescription& model_;
  const PrefillOptions& options_;
  int64_t tokens_, chunk_;
  at::Tensor x_;  // [N, hidden]: updated in place, layer after layer
  RopeTable rope_;
  std::unique_ptr<KvCache> cache_;  // of the layer at hand
  Collector collector_;
};

}  // namespace

Result<std::vector<float>> ModelRunner::prefill(std::span<const int32_t> tokens,
                                                const PrefillOptions& options) {
  return guarded([&]() -> Result<std::vector<float>> {
    const auto count = static_cast<int64_t>(tokens.size());
    SQZ_RETURN_IF_ERROR(check_tokens(config().description, tokens, 0));
    SQZ_RETURN_IF_ERROR(check_positions(options.query_positions, "query_positions", count));
    SQZ_RETURN_IF_ERROR(check_positions(options.logit_positions, "logit_positions", count));
    if (options.chunk < 0) {
      return Status(Code::kInvalidArgument,
                    concat("chunk ", options.chunk, ": expected 0 or more"));
    }
    DensePass pass(transformer_, options, tokens);
    SQZ_RETURN_IF_ERROR(pass.run());
    return pass.logits();
  });
}

}  // namespace sqz::training
