#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "training/cuda/kernels.h"
#include "training/model_runner.h"
#include "training/step_engine.h"

namespace sqz::training {
namespace {

constexpr int64_t kMostRows = kMaxContextTokens;  // of a step; longer prompts take several
constexpr int64_t kMostChecked = 32;  // rows of one request that are worth a graph of their own
constexpr size_t kUploads = 4;        // more than steps can be under way

// Rows of a step as its kernels read them.
enum Row { kSlot, kToken, kAt, kLast, kRowKinds };

DType dtype_of(at::ScalarType type) {
  return type == at::kBFloat16 ? DType::kBF16 : DType::kF32;
}

// Whether the kernels have the model's shape.
bool fits(const ModelConfig& config) {
  const ModelDescription& model = config.description;
  const auto dims = {64, 96, 128, 256};
  return std::find(dims.begin(), dims.end(), model.head_dim) != dims.end() &&
         model.group_size() <= 8 && model.hidden_size % 8 == 0 &&
         std::all_of(model.sliding_window.begin(), model.sliding_window.end(),
                     [](int64_t window) { return window == 0; });
}

class GraphEngine final : public StepEngine {
 public:
  // The last slot is for rows that fill a step up.
  GraphEngine(const Transformer& transformer, const sqz::cuda::Device& device, int64_t first,
              int64_t slots)
      : transformer_(transformer),
        weights_(transformer.weights()),
        config_(transformer.config()),
        first_(first),
        slots_(slots),
        stream_(c10::cuda::getStreamFromPool(true, transformer.device().index())),
        pool_(at::cuda::graph_pool_handle()),
        lengths_(static_cast<size_t>(slots) + 1) {
    const ModelDescription& model = config_.description;
    const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
    sizes_ = {.dtype = dtype_of(weights_.embedding.scalar_type()),
              .hidden = narrow(model.hidden_size),
              .query_heads = narrow(model.query_heads),
              .kv_heads = narrow(model.kv_heads),
              .head_dim = narrow(model.head_dim),
              .intermediate = narrow(config_.intermediate_size),
              .vocab = narrow(model.vocab_size),
              .rms_eps = static_cast<float>(config_.rms_norm_eps),
              .attention_scale = static_cast<float>(model.attention_scale),
              .device = device};
    const c10::cuda::CUDAStreamGuard guard(stream_);
    const auto numbers = at::device(transformer.device()).dtype(at::kInt);
    slot_token_ = at::zeros({slots + 1}, numbers);
    slot_length_ = at::zeros({slots + 1}, numbers);
    rows_ = at::zeros({kRowKinds, kMostRows}, numbers);
    place_ = at::zeros({kMostRows}, numbers);
    choice_ = at::zeros({kMostRows}, numbers);
    const auto pinned = at::device(at::kCPU).dtype(at::kInt).pinned_memory(true);
    uploads_ = at::empty({static_cast<int64_t>(kUploads), kRowKinds, kMostRows}, pinned);
    choices_ = at::empty({static_cast<int64_t>(kUploads), kMostRows}, pinned);
  }

  int64_t slots() const override { return slots_; }
  bool runs_ahead() const override { return true; }

  Status reserve(int64_t tokens) override {
    if (tokens <= capacity_) return {};
    const int64_t grown = std::max({tokens, 2 * capacity_, int64_t{64}});
    const c10::cuda::CUDAStreamGuard guard(stream_);
    graphs_.clear();  // they have the addresses
    const ModelDescription& model = config_.description;
    for (at::Tensor* cache : {&keys_, &values_}) {
      at::Tensor wider =
          at::empty({model.layers, slots_ + 1, model.kv_heads, grown, model.head_dim},
                    weights_.embedding.options());
      if (capacity_ > 0) wider.narrow(3, 0, capacity_).copy_(*cache);
      *cache = wider;
    }
    rope_ = transformer_.rope(first_, grown);
    capacity_ = grown;
    return {};
  }

  Status start(std::span<const StepPart> parts, const StepOptions& options) override {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    if (parts.size() == 1 && std::ssize(parts[0].tokens) > kMostRows) {
      StepPart piece = parts[0];
      piece.tokens.resize(kMostRows);
      SQZ_RETURN_IF_ERROR(run({&piece, 1}, options));
      stream_.synchronize();  // the next piece's rows take the place of these
      piece.at += kMostRows;
      piece.tokens.assign(parts[0].tokens.begin() + kMostRows, parts[0].tokens.end());
      return start({&piece, 1}, options);
    }
    SQZ_RETURN_IF_ERROR(run(parts, options));
    // What the host waits for.
    Pending& pending = pending_.emplace_back();
    pending.results = options.all_rows ? indptr_.back() : std::ssize(parts);
    pending.at = next_;
    if (options.logits) pending.logits = logits_.narrow(0, 0, pending.results);
    choices_[static_cast<int64_t>(next_)]
        .narrow(0, 0, pending.results)
        .copy_(choice_.narrow(0, 0, pending.results), /*non_blocking=*/true);
    pending.done.record(stream_);
    next_ = (next_ + 1) % kUploads;
    return {};
  }

  Result<StepResult> finish() override {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    Pending pending = std::move(pending_.front());
    pending_.pop_front();
    pending.done.synchronize();
    StepResult out;
    const auto* choices =
        choices_.data_ptr<int32_t>() + static_cast<int64_t>(pending.at) * kMostRows;
    out.choices.assign(choices, choices + pending.results);
    if (pending.logits.defined()) {
      out.logits = pending.logits.to(at::kCPU, at::kFloat).contiguous();
    }
    return out;
  }

 private:
  struct Pending {
    int64_t results = 0;
    size_t at = 0;  // its part of choices_
    at::Tensor logits;
    at::cuda::CUDAEvent done;
  };
  struct Key {
    FixedContext* context;
    bool all_rows;
    std::vector<int64_t> indptr;
    auto operator<=>(const Key&) const = default;
  };
  struct Graph {
    std::unique_ptr<at::cuda::CUDAGraph>
        captured;  // null after the first step, which runs as it is
    at::Tensor logits;
  };

  // A step on the stream: as it is the first time, then captured, then replayed.
  Status run(std::span<const StepPart> parts, const StepOptions& options) {
    SQZ_RETURN_IF_ERROR(upload(parts, options.all_rows));
    Key key{options.context, options.all_rows, indptr_};
    const bool single = indptr_.back() == std::ssize(indptr_) - 1;
    if (!single && !(parts.size() == 1 && indptr_.back() <= kMostChecked)) {
      return forward(key, logits_);
    }
    const auto [found, first] = graphs_.try_emplace(std::move(key));
    Graph& graph = found->second;
    if (first) return forward(found->first, logits_);
    if (graph.captured == nullptr) {
      auto captured = std::make_unique<at::cuda::CUDAGraph>();
      captured->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
      const Status status = forward(found->first, graph.logits);
      captured->capture_end();
      SQZ_RETURN_IF_ERROR(status);
      graph.captured = std::move(captured);
    }
    graph.captured->replay();
    logits_ = graph.logits;
    return {};
  }

  // Rows that fill up a step of several requests, so that few graphs serve all numbers of them.
  static int64_t filled(int64_t rows) {
    int64_t step = 1;
    while (8 * step < rows) step *= 2;
    return (rows + step - 1) / step * step;
  }

  // indptr_ and the rows on the device, unless they are there.
  Status upload(std::span<const StepPart> parts, bool all_rows) {
    std::array<std::vector<int32_t>, kRowKinds> rows;
    const auto add = [&](int64_t slot, int64_t token, int64_t at) {
      rows[kSlot].push_back(static_cast<int32_t>(slot));
      rows[kToken].push_back(static_cast<int32_t>(token));
      rows[kAt].push_back(static_cast<int32_t>(at));
    };
    indptr_ = {0};
    for (const StepPart& part : parts) {
      auto& length = lengths_[static_cast<size_t>(part.slot)];
      const int64_t count = std::max<int64_t>(1, std::ssize(part.tokens));
      for (int64_t i = 0; i < count; ++i) {
        const bool known = count == 1 && part.at == length;
        add(part.slot, part.tokens.empty() ? -1 : part.tokens[static_cast<size_t>(i)],
            known ? -1 : part.at + i);
      }
      length = part.at + count;
      indptr_.push_back(indptr_.back() + count);
    }
    if (indptr_.back() == std::ssize(parts)) {
      for (int64_t i = std::ssize(parts); i < filled(std::ssize(parts)); ++i) {
        add(slots_, 0, 0);
        indptr_.push_back(i + 1);
      }
    }
    const int64_t count = indptr_.back();
    if (count > kMostRows) return {Code::kInternal, concat("a step of ", count, " rows")};
    for (int64_t i = 0; i < count; ++i) {
      const bool ends = i + 1 < std::ssize(indptr_) && !all_rows;
      rows[kLast].push_back(
          static_cast<int32_t>(ends ? indptr_[static_cast<size_t>(i) + 1] - 1 : i));
    }
    if (rows == uploaded_) return {};
    at::Tensor buffer = uploads_[static_cast<int64_t>(next_)];
    for (int64_t kind = 0; kind < kRowKinds; ++kind) {
      std::copy(rows[kind].begin(), rows[kind].end(), buffer[kind].data_ptr<int32_t>());
      rows_[kind].narrow(0, 0, count).copy_(buffer[kind].narrow(0, 0, count), true);
    }
    uploaded_ = std::move(rows);
    return {};
  }

  at::Tensor empty(int64_t rows, int64_t columns) const {
    return at::empty({rows, columns}, weights_.embedding.options());
  }
  const int32_t* row(Row kind) const { return rows_[kind].data_ptr<int32_t>(); }

  // A row by itself, by a kernel of its own; undefined where that cannot be. `params` has what goes
  // beyond a product.
  Result<at::Tensor> multiply_row(const Linear& linear, const at::Tensor& x,
                                  cuda::ProductParams params) const {
    params.weight = linear.weight.data_ptr();
    params.bias = linear.bias.defined() ? linear.bias.data_ptr() : nullptr;
    params.x = x.data_ptr();
    params.in = x.size(1);
    params.out_features = linear.weight.size(0);
    if (x.size(0) > 1 || !cuda::fits_multiply_row(sizes_, params)) return at::Tensor();
    const at::Tensor out = empty(1, params.out_features / (params.gated ? 2 : 1));
    params.out = out.data_ptr();
    SQZ_RETURN_IF_ERROR(cuda::multiply_row(sizes_, params, stream_));
    return out;
  }

  Result<at::Tensor> multiply(const Linear& linear, const at::Tensor& x) const {
    SQZ_ASSIGN_OR_RETURN(const at::Tensor out, multiply_row(linear, x, {}));
    return out.defined() ? out : apply(linear, x);
  }

  // x += delta, and the product with the norm of it; gated: of the gate's and its values' weights.
  Result<at::Tensor> multiply_norm(const Linear& linear, at::Tensor& x, const at::Tensor& delta,
                                   const at::Tensor& weight, bool gated = false) const {
    const at::Tensor sum = at::empty_like(x);
    SQZ_ASSIGN_OR_RETURN(at::Tensor out,
                         multiply_row(linear, x,
                                      {.delta = delta.defined() ? delta.data_ptr() : nullptr,
                                       .norm = weight.data_ptr(),
                                       .sum = sum.data_ptr(),
                                       .gated = gated}));
    if (out.defined()) {
      x = sum;
      return out;
    }
    SQZ_ASSIGN_OR_RETURN(const at::Tensor h, norm(x, delta, weight, x.size(0)));
    SQZ_ASSIGN_OR_RETURN(out, multiply(linear, h));
    if (!gated) return out;
    const at::Tensor values = empty(x.size(0), sizes_.intermediate);
    SQZ_RETURN_IF_ERROR(cuda::gate(sizes_, static_cast<int32_t>(x.size(0)), out.data_ptr(),
                                   values.data_ptr(), stream_));
    return values;
  }

  Result<at::Tensor> norm(at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                          int64_t rows, const int32_t* picked = nullptr) const {
    at::Tensor out = empty(rows, x.size(1));
    SQZ_RETURN_IF_ERROR(cuda::add_norm(sizes_,
                                       {.rows = static_cast<int32_t>(rows),
                                        .x = x.data_ptr(),
                                        .delta = delta.defined() ? delta.data_ptr() : nullptr,
                                        .weight = weight.data_ptr(),
                                        .picked = picked,
                                        .out = out.data_ptr()},
                                       stream_));
    return out;
  }

  // The attention of a layer, [rows, Hq d].
  Result<at::Tensor> attend(const Key& key, int64_t l, const at::Tensor& qkv) {
    const LayerWeights& layer = weights_.layers[static_cast<size_t>(l)];
    const int64_t count = qkv.size(0), width = int64_t{sizes_.query_heads} * sizes_.head_dim;
    // A token by itself is served in the precision of its sums.
    const DType dtype = count == 1 ? DType::kF32 : key.context->device_dtype();
    const auto like_context = qkv.options().dtype(scalar_type(dtype));
    const at::Tensor q = empty(count, width), context_q = at::empty({count, width}, like_context),
                     before = at::empty_like(context_q), context_out = at::empty_like(context_q),
                     lse = at::empty({count, sizes_.query_heads}, qkv.options().dtype(at::kFloat));
    const at::Tensor keys = keys_[l], values = values_[l];
    SQZ_RETURN_IF_ERROR(
        cuda::rotate(sizes_,
                     {.rows = static_cast<int32_t>(count),
                      .slot = row(kSlot),
                      .place = place_.data_ptr<int32_t>(),
                      .qkv = qkv.data_ptr(),
                      .q_norm = layer.q_norm.defined() ? layer.q_norm.data_ptr() : nullptr,
                      .k_norm = layer.k_norm.defined() ? layer.k_norm.data_ptr() : nullptr,
                      .cosine = rope_.cos.data_ptr<float>(),
                      .sine = rope_.sin.data_ptr<float>(),
                      .q = q.data_ptr(),
                      .context_dtype = dtype,
                      .context_q = context_q.data_ptr(),
                      .context_before = before.data_ptr(),
                      .keys = keys.data_ptr(),
                      .values = values.data_ptr(),
                      .capacity = capacity_},
                     stream_));
    DeviceQueries queries;
    queries.dtype = dtype;
    queries.q = context_q.data_ptr();
    queries.before_rope = before.data_ptr();
    queries.out = context_out.data_ptr();
    queries.lse = lse.data_ptr<float>();
    queries.indptr = key.indptr;
    queries.stream = stream_.stream();
    SQZ_RETURN_IF_ERROR(key.context->attend_on_device(l, queries));
    at::Tensor out = empty(count, width);
    SQZ_RETURN_IF_ERROR(cuda::attend_own(sizes_,
                                         {.rows = static_cast<int32_t>(count),
                                          .slot = row(kSlot),
                                          .place = place_.data_ptr<int32_t>(),
                                          .q = q.data_ptr(),
                                          .keys = keys.data_ptr(),
                                          .values = values.data_ptr(),
                                          .capacity = capacity_,
                                          .context_dtype = dtype,
                                          .context_out = context_out.data_ptr(),
                                          .context_lse = lse.data_ptr<float>(),
                                          .out = out.data_ptr()},
                                         stream_));
    return out;
  }

  // All kernels of a step on the stream. `logits`, out: of the rows that are chosen from.
  Status forward(const Key& key, at::Tensor& logits) {
    const int64_t count = key.indptr.back();
    const int64_t chosen = key.all_rows ? count : std::ssize(key.indptr) - 1;
    at::Tensor x = empty(count, sizes_.hidden), delta;
    SQZ_RETURN_IF_ERROR(cuda::embed(sizes_,
                                    {.rows = static_cast<int32_t>(count),
                                     .slot = row(kSlot),
                                     .token = row(kToken),
                                     .at = row(kAt),
                                     .slot_token = slot_token_.data_ptr<int32_t>(),
                                     .slot_length = slot_length_.data_ptr<int32_t>(),
                                     .place = place_.data_ptr<int32_t>()},
                                    weights_.embedding.data_ptr(), x.data_ptr(), stream_));
    for (int64_t l = 0; l < config_.description.layers; ++l) {
      const LayerWeights& layer = weights_.layers[static_cast<size_t>(l)];
      SQZ_ASSIGN_OR_RETURN(const at::Tensor qkv,
                           multiply_norm(layer.qkv, x, delta, layer.input_norm));
      SQZ_ASSIGN_OR_RETURN(const at::Tensor state, attend(key, l, qkv));
      SQZ_ASSIGN_OR_RETURN(delta, multiply(layer.o, state));
      SQZ_ASSIGN_OR_RETURN(const at::Tensor gated,
                           multiply_norm(layer.gate_up, x, delta, layer.attention_norm, true));
      SQZ_ASSIGN_OR_RETURN(delta, multiply(layer.down, gated));
    }
    const Linear head = {weights_.lm_head, {}};
    if (count == 1) {
      SQZ_ASSIGN_OR_RETURN(logits, multiply_norm(head, x, delta, weights_.norm));
    } else {
      SQZ_ASSIGN_OR_RETURN(const at::Tensor last,
                           norm(x, delta, weights_.norm, chosen, row(kLast)));
      SQZ_ASSIGN_OR_RETURN(logits, multiply(head, last));
    }
    return cuda::choose(sizes_,
                        {.parts = static_cast<int32_t>(chosen),
                         .logits = logits.data_ptr(),
                         .last_row = row(kLast),
                         .slot = row(kSlot),
                         .place = place_.data_ptr<int32_t>(),
                         .slot_token = slot_token_.data_ptr<int32_t>(),
                         .slot_length = slot_length_.data_ptr<int32_t>(),
                         .choice = choice_.data_ptr<int32_t>()},
                        stream_);
  }

  const Transformer& transformer_;
  const ModelWeights& weights_;
  const ModelConfig& config_;
  cuda::ModelSizes sizes_;
  int64_t first_, slots_, capacity_ = 0;
  c10::cuda::CUDAStream stream_;
  at::cuda::MempoolId_t pool_;
  RopeTable rope_;                       // of the positions that own tokens can have
  at::Tensor keys_, values_;             // [layers, slots + 1, Hkv, capacity, d]
  at::Tensor slot_token_, slot_length_;  // [slots + 1]
  at::Tensor rows_, place_, choice_;     // [kRowKinds, kMostRows], [kMostRows], [kMostRows]
  at::Tensor uploads_, choices_;         // pinned, one of each for a step under way
  at::Tensor logits_;                    // of the last step
  std::vector<int64_t> lengths_;         // slot_length_, once all steps are done
  std::vector<int64_t> indptr_;          // of the last step
  std::array<std::vector<int32_t>, kRowKinds> uploaded_;
  std::map<Key, Graph> graphs_;
  std::deque<Pending> pending_;
  size_t next_ = 0;
};

}  // namespace

Result<std::unique_ptr<StepEngine>> make_graph_engine(const Transformer& transformer,
                                                      const FixedContext& context, int64_t slots) {
  const at::Device device = transformer.device();
  if (!device.is_cuda() || context.device() != std::optional<int>(device.index()) ||
      !fits(transformer.config())) {
    return std::unique_ptr<StepEngine>();
  }
  SQZ_ASSIGN_OR_RETURN(const sqz::cuda::Device found, sqz::cuda::read_device(device.index()));
  return std::unique_ptr<StepEngine>(
      std::make_unique<GraphEngine>(transformer, found, context.tokens(), slots));
}

}  // namespace sqz::training
