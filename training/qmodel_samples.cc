#include "training/qmodel_samples.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "libindex/kmeans.h"

namespace sqz::training {
namespace {

constexpr int64_t kScoreBytes = int64_t{256} << 20;  // of one block of rows against all keys
constexpr float kNever = -std::numeric_limits<float>::infinity();

at::Tensor to_device(std::span<const float> values, at::IntArrayRef shape, at::Device device) {
  // from_blob() is read only: the tensor is copied at once.
  return at::from_blob(const_cast<float*>(values.data()), shape, at::kFloat)
      .to(device, at::kFloat, false, true);
}

// body(first, count) for blocks of rows whose scores against `keys` keys fit.
template <class Body>
void for_row_blocks(int64_t rows, int64_t keys, Body&& body) {
  const int64_t block =
      std::max<int64_t>(1, kScoreBytes / (std::max<int64_t>(keys, 1) * int64_t{sizeof(float)}));
  for (int64_t first = 0; first < rows; first += block) body(first, std::min(block, rows - first));
}

// [R, N] bool: the key is far from the row's token.
at::Tensor far_mask(const at::Tensor& positions, int64_t keys, const FarKeys& far) {
  const at::Tensor key = at::arange(keys, positions.options()).unsqueeze(0);
  return (key >= far.sink).logical_and(key < (positions - far.recent).unsqueeze(1));
}

at::Tensor block_scores(const HeadRows& rows, int64_t first, int64_t count) {
  return at::mm(rows.queries.narrow(0, first, count), rows.keys.t()).mul_(rows.scale);
}

at::Tensor membership(const at::Tensor& buckets, int64_t count) {
  at::Tensor out = at::zeros({buckets.size(0), count}, buckets.options().dtype(at::kFloat));
  return out.scatter_(1, buckets.unsqueeze(1), 1.0);
}

HeadRows head_rows(const WindowLayer& layer, int64_t head, double scale, const FarKeys& far) {
  const int64_t n = layer.queries.size(1), group = layer.queries.size(2);
  HeadRows rows;
  rows.queries = layer.roped_queries.select(0, head).reshape({n * group, -1});
  rows.positions = layer.positions.unsqueeze(1).expand({n, group}).reshape({n * group});
  rows.keys = layer.roped_keys.select(0, head);
  rows.scale = scale;
  rows.far = far;
  return rows;
}

// Rows whose best key is far (true in `is_far`) and rows whose best is not, in the shares asked for
// where there are enough of both: at most choice.most row numbers.
at::Tensor draw_rows(const at::Tensor& is_far, const SampleChoice& choice, uint64_t seed) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto draw = [&](const at::Tensor& chosen, int64_t most) {
    const at::Tensor found = chosen.nonzero().squeeze(1);
    const int64_t count = std::min(most, found.size(0));
    return found.index_select(0,
                              at::randperm(found.size(0), random, at::kLong).narrow(0, 0, count));
  };
  const auto near =
      static_cast<int64_t>(std::llround(choice.near * static_cast<double>(choice.most)));
  const at::Tensor far_rows = draw(is_far, choice.most - near);
  return near == 0 ? far_rows : at::cat({far_rows, draw(is_far.logical_not(), near)});
}

// std::shuffle's draws are the library's choice; these are ours.
uint64_t below(std::mt19937_64& random, uint64_t bound) {
  return random() % bound;
}

Status check_finite(const WindowLayer& layer, const std::string& window, int64_t number) {
  for (const auto& [what, rows] :
       {std::pair("keys", &layer.roped_keys), std::pair("queries", &layer.roped_queries)}) {
    if (rows->isfinite().all().item<bool>()) continue;
    return {Code::kNumeric, bad_field(window, concat(what, " of layer ", number), "NaN or infinity",
                                      "finite numbers")};
  }
  return {};
}

}  // namespace

std::vector<TokenText> cut_windows(std::span<const TokenText> texts, const QmodelOptions& options) {
  const int32_t first = options.first_token;
  const auto full = static_cast<size_t>(options.window);
  std::vector<TokenText> out;
  for (const TokenText& text : texts) {
    std::span<const int32_t> rest(text.tokens);
    if (first >= 0 && !rest.empty() && rest.front() == first) rest = rest.subspan(1);
    const size_t room = full - (first >= 0 ? 1 : 0);
    while (2 * rest.size() >= full) {
      const auto part = rest.first(std::min(room, rest.size()));
      TokenText window{text.name, {}};
      if (first >= 0) window.tokens.push_back(first);
      window.tokens.insert(window.tokens.end(), part.begin(), part.end());
      out.push_back(std::move(window));
      rest = rest.subspan(part.size());
    }
  }
  return out;
}

std::vector<int64_t> shuffled(int64_t count, uint64_t seed) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), int64_t{0});
  std::mt19937_64 random(seed);
  for (size_t i = out.size(); i > 1; --i) std::swap(out[i - 1], out[below(random, i)]);
  return out;
}

std::vector<int64_t> draw_positions(int64_t first, int64_t tokens, int64_t most, uint64_t seed) {
  std::vector<int64_t> out = shuffled(std::max<int64_t>(tokens - first, 0), seed);
  out.resize(std::min(out.size(), static_cast<size_t>(most)));
  for (int64_t& position : out) position += first;
  std::sort(out.begin(), out.end());
  return out;
}

WindowLayer window_layer(const LayerCapture& capture, const ModelDescription& model,
                         const std::vector<int64_t>& positions, const RopeTable& rope,
                         at::Device device) {
  const int64_t heads = model.kv_heads, group = model.group_size(), dim = model.head_dim;
  const auto n = static_cast<int64_t>(positions.size());
  const at::Tensor keys =
      to_device(capture.keys_pre_rope,
                {heads, std::ssize(capture.keys_pre_rope) / (heads * dim), dim}, device);
  const at::Tensor queries =
      to_device(capture.queries_pre_rope, {heads * group, n, dim}, device).transpose(0, 1);
  WindowLayer out;
  out.positions = at::tensor(positions, at::kLong).to(device);
  const RopeTable of_keys = {rope.cos.to(device), rope.sin.to(device)};
  const RopeTable of_queries = {of_keys.cos.index_select(0, out.positions),
                                of_keys.sin.index_select(0, out.positions)};
  const auto grouped = [&](const at::Tensor& q) {  // [n, Hq, d] -> [Hkv, n, G, d]
    return q.reshape({n, heads, group, dim}).transpose(0, 1).contiguous();
  };
  out.keys = keys;
  out.roped_keys = apply_rope(keys.transpose(0, 1), of_keys).transpose(0, 1).contiguous();
  out.queries = grouped(queries);
  out.roped_queries = grouped(apply_rope(queries, of_queries));
  return out;
}

Status run_window(Runner& runner, const TokenText& window, const WindowPass& pass,
                  const std::function<Status(int64_t, const WindowLayer&)>& body) {
  const ModelDescription& model = runner.config().description;
  const RopeTable host =
      rope_table(model.rope, model.head_dim, 0, static_cast<int64_t>(window.tokens.size()));
  const RopeTable rope = {host.cos.to(pass.device), host.sin.to(pass.device)};
  PrefillOptions options;
  options.pre_rope = true;
  options.on_device = true;  // keys after RoPE are made from those before
  options.query_positions = pass.positions;
  options.progress = pass.progress;
  options.consumer = [&](const LayerCapture& capture) -> Status {
    const auto at = std::lower_bound(pass.layers.begin(), pass.layers.end(), capture.layer);
    if (at != pass.layers.end() && *at == capture.layer) {
      const WindowLayer layer = window_layer(capture, model, pass.positions, rope, pass.device);
      SQZ_RETURN_IF_ERROR(check_finite(layer, window.name, capture.layer));
      SQZ_RETURN_IF_ERROR(body(at - pass.layers.begin(), layer));
    }
    return {};
  };
  return runner.prefill(window.tokens, options);
}

at::Tensor nearest_buckets(const at::Tensor& keys, const at::Tensor& centroids) {
  const int64_t heads = keys.size(0), count = keys.size(1);
  at::Tensor out = at::empty({heads, count}, keys.options().dtype(at::kLong));
  for (int64_t head = 0; head < heads; ++head) {
    const at::Tensor buckets = centroids.select(0, head).t();
    for_row_blocks(count, buckets.size(1), [&](int64_t first, int64_t rows) {
      out.select(0, head)
          .narrow(0, first, rows)
          .copy_(at::mm(keys.select(0, head).narrow(0, first, rows), buckets).argmax(1));
    });
  }
  return out;
}

at::Tensor best_is_far(const HeadRows& rows) {
  const int64_t keys = rows.keys.size(0);
  at::Tensor out = at::empty({rows.queries.size(0)}, rows.positions.options().dtype(at::kBool));
  for_row_blocks(rows.queries.size(0), keys, [&](int64_t first, int64_t count) {
    const at::Tensor positions = rows.positions.narrow(0, first, count);
    const at::Tensor scores = block_scores(rows, first, count);
    const at::Tensor key = at::arange(keys, positions.options()).unsqueeze(0);
    const at::Tensor visible = (key >= rows.far.sink).logical_and(key <= positions.unsqueeze(1));
    const at::Tensor best = scores.masked_fill(visible.logical_not(), kNever).argmax(1);
    const at::Tensor back = positions - best;
    out.narrow(0, first, count).copy_((back > rows.far.recent).logical_and(best >= rows.far.sink));
  });
  return out;
}

at::Tensor bucket_masses(const HeadRows& rows, const at::Tensor& buckets, int64_t count) {
  const at::Tensor hot = membership(buckets, count);
  at::Tensor out = at::empty({rows.queries.size(0), count}, rows.queries.options());
  for_row_blocks(rows.queries.size(0), rows.keys.size(0), [&](int64_t first, int64_t block) {
    const at::Tensor far =
        far_mask(rows.positions.narrow(0, first, block), rows.keys.size(0), rows.far);
    at::Tensor scores = block_scores(rows, first, block).masked_fill_(far.logical_not(), kNever);
    const at::Tensor any = far.any(1).unsqueeze(1);
    scores.masked_fill_(any.logical_not(), 0);  // else NaN
    out.narrow(0, first, block).copy_(at::mm(scores.softmax(1), hot).mul_(any));
  });
  return out;
}

at::Tensor bucket_sizes(const at::Tensor& positions, const at::Tensor& buckets, int64_t count,
                        const FarKeys& far) {
  at::Tensor hot = membership(buckets, count);
  hot.narrow(0, 0, std::min(far.sink, hot.size(0))).zero_();
  const at::Tensor before = at::cat({at::zeros({1, count}, hot.options()), hot.cumsum(0)});
  return before.index_select(0, (positions - far.recent).clamp(0, buckets.size(0)));
}

TrainSamples train_samples(const WindowLayer& layer, const at::Tensor& centroids, double scale,
                           const FarKeys& far, const SampleChoice& choice) {
  const int64_t heads = layer.keys.size(0), dim = layer.keys.size(2), buckets = centroids.size(1);
  const at::Tensor assigned = nearest_buckets(layer.keys, centroids);
  TrainSamples out;
  out.queries = at::zeros({heads, choice.most, dim}, layer.keys.options());
  out.masses = at::zeros({heads, choice.most, buckets}, layer.keys.options());
  out.log_sizes = at::zeros_like(out.masses);
  out.counts = at::zeros({heads}, at::kLong);
  for (int64_t head = 0; head < heads; ++head) {
    HeadRows rows = head_rows(layer, head, scale, far);
    const at::Tensor chosen =
        draw_rows(best_is_far(rows).cpu(), choice, kmeans_seed(choice.seed, head, 0, 0))
            .to(layer.keys.device());
    const int64_t count = chosen.size(0);
    out.counts[head] = count;
    if (count == 0) continue;
    rows.queries = rows.queries.index_select(0, chosen);
    rows.positions = rows.positions.index_select(0, chosen);
    out.queries.select(0, head)
        .narrow(0, 0, count)
        .copy_(layer.queries.select(0, head).reshape({-1, dim}).index_select(0, chosen));
    out.masses.select(0, head)
        .narrow(0, 0, count)
        .copy_(bucket_masses(rows, assigned.select(0, head), buckets));
    out.log_sizes.select(0, head)
        .narrow(0, 0, count)
        .copy_(log_sizes(bucket_sizes(rows.positions, assigned.select(0, head), buckets, far)));
  }
  return out;
}

SamplePool::SamplePool(const NetworkShape& shape, int64_t windows, int64_t rows,
                       at::Device device) {
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(device);
  queries_ = at::zeros({windows, shape.heads, rows, shape.dim}, options);
  masses_ = at::zeros({windows, shape.heads, rows, shape.buckets}, options.dtype(at::kHalf));
  log_sizes_ = at::zeros_like(masses_);
  counts_ = at::zeros({windows, shape.heads}, options.dtype(at::kDouble));
}

uint64_t SamplePool::window_bytes(const NetworkShape& shape, int64_t rows) {
  return static_cast<uint64_t>(shape.heads) * static_cast<uint64_t>(rows) *
         static_cast<uint64_t>(shape.dim * int64_t{sizeof(float)} +
                               2 * shape.buckets * int64_t{sizeof(at::Half)});
}

void SamplePool::put(int64_t window, int64_t first, const TrainSamples& samples) {
  const int64_t slot = window % windows(), heads = samples.queries.size(0);
  queries_.select(0, slot).narrow(0, first, heads).copy_(samples.queries);
  masses_.select(0, slot).narrow(0, first, heads).copy_(samples.masses);
  log_sizes_.select(0, slot).narrow(0, first, heads).copy_(samples.log_sizes);
  counts_.select(0, slot).narrow(0, first, heads).copy_(samples.counts);
}

NetworkBatch SamplePool::draw(int64_t end, int64_t rows, uint64_t seed) const {
  const c10::InferenceMode off(false);
  const int64_t heads = queries_.size(1), most = queries_.size(2);
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Device device = queries_.device();
  const at::Tensor window =
      at::randint(std::min(end, windows()), {rows}, random, at::kLong).to(device);
  const at::Tensor place = at::rand({rows}, random, at::kDouble).to(device);
  const at::Tensor counts = counts_.index_select(0, window).t();  // [n, rows]
  const at::Tensor row = (counts * place).floor().to(at::kLong);  // below counts: place < 1
  const at::Tensor head = at::arange(heads, window.options()).unsqueeze(1);
  const at::Tensor flat = ((window.unsqueeze(0) * heads + head) * most + row).view({-1});
  const auto pick = [&](const at::Tensor& from) {
    return from.view({-1, from.size(3)})
        .index_select(0, flat)
        .view({heads, rows, from.size(3)})
        .to(at::kFloat);
  };
  return {pick(queries_), pick(masses_), pick(log_sizes_), (counts > 0).to(at::kFloat)};
}

RecallSamples recall_samples(const WindowLayer& layer, const at::Tensor& centroids, double scale,
                             const FarKeys& far) {
  const int64_t heads = layer.keys.size(0), n = layer.queries.size(1),
                group = layer.queries.size(2), buckets = centroids.size(1);
  const at::Tensor assigned = nearest_buckets(layer.keys, centroids);
  // So many tokens behind its end, every key of the window is far.
  const FarKeys all = {far.sink, -layer.keys.size(1)};
  std::vector<at::Tensor> masses, is_far, window_sizes, far_sizes;
  for (int64_t head = 0; head < heads; ++head) {
    const HeadRows rows = head_rows(layer, head, scale, far);
    const at::Tensor of_head = assigned.select(0, head);
    masses.push_back(bucket_masses(rows, of_head, buckets).view({n, group, buckets}));
    is_far.push_back(best_is_far(rows).view({n, group}));
    window_sizes.push_back(bucket_sizes(layer.positions, of_head, buckets, all));
    far_sizes.push_back(bucket_sizes(layer.positions, of_head, buckets, far));
  }
  return {layer.queries.reshape({heads, n * group, -1}), at::stack(masses), at::stack(is_far),
          at::stack(window_sizes), at::stack(far_sizes)};
}

at::Tensor recall_at(double selectivity, const at::Tensor& scores, const at::Tensor& sizes,
                     const at::Tensor& masses) {
  const at::Tensor order = scores.argsort(2, true);
  const at::Tensor sorted = sizes.gather(2, order);
  const at::Tensor read_before = sorted.cumsum(2) - sorted;
  const at::Tensor budget = sizes.sum(2, true) * selectivity;
  const at::Tensor part = ((budget - read_before) / sorted.clamp_min(1)).clamp_(0, 1);
  const at::Tensor found = masses.gather(3, order.unsqueeze(2).expand_as(masses));
  return (found * part.unsqueeze(2)).sum(3);
}

}  // namespace sqz::training
