// `attend` and `prefill`: sqz.h's sessions over one layer, dense and sparse.
#include <filesystem>
#include <numeric>
#include <optional>

#include "formats/base/temporaries.h"
#include "sqz/sqz.hpp"
#include "tools/common/output_file.h"
#include "tools/sqz_bench/benchmarks.h"

namespace sqz::bench {
namespace {

using runtime::Index, runtime::Session;

// Calls of a GPU use copies of the layer in turn, so that the L2 cache holds nothing of the next
// call.
constexpr int kCopies = 4;

// The benchmarks of a run share this.
struct Layer {
  std::shared_ptr<const Device> device;
  std::shared_ptr<const SqzFile> file;
  std::vector<Index> copies;
  bool prompt = false;
  int64_t contexts = 0;  // as in AttentionOptions
  int threads = 0;
  uint64_t seed = 0;

  const ModelDescription& model() const { return file->metadata().model; }
};

struct Case {
  bool dense = true;
  int64_t tokens = 1, block = 0;
  int rule = SQZ_RULE_BUDGET, levels = 0;
  double keep = 0;
};

// Memory and a tensor over it.
class Tensor {
 public:
  Tensor(const Device& device, std::vector<int64_t> shape, DType dtype,
         std::span<const std::byte> bytes)
      : shape_(std::move(shape)), memory_(device.copy(bytes)) {
    tensor_.data = memory_.get();
    tensor_.device_type = device.number() < 0 ? 1 : 2;
    tensor_.device_id = std::max(device.number(), 0);
    tensor_.ndim = static_cast<int32_t>(shape_.size());
    tensor_.dtype_code = dtype == DType::kBF16 ? 4 : 2;
    tensor_.dtype_bits = static_cast<uint8_t>(8 * dtype_size(dtype));
    tensor_.dtype_lanes = 1;
    tensor_.shape = shape_.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  sqz_tensor* get() { return &tensor_; }

 private:
  std::vector<int64_t> shape_;
  std::shared_ptr<void> memory_;
  sqz_tensor tensor_{};
};

sqz_session_options session_options(const Layer& layer, const Case& what) {
  auto options = runtime::make<sqz_session_options>();
  options.device_type = layer.device->number() < 0 ? 1 : 2;
  options.device_id = std::max(layer.device->number(), 0);
  options.threads = layer.threads;
  options.max_tokens = what.tokens;
  options.max_request_tokens = layer.prompt ? what.tokens : 1;
  options.block = what.block;
  options.selector = what.dense ? SQZ_SELECTOR_DENSE : SQZ_SELECTOR_AUTO;
  if (what.dense) return options;
  options.rule = what.rule;
  options.levels = what.levels;
  options.keep = what.keep;
  options.dense_layers = -1;
  options.uniform_layers = 1;
  return options;
}

class Serving {
 public:
  Serving(const Layer& layer, const Case& what) : layer_(layer) {
    const int64_t heads = layer.model().query_heads, dim = layer.model().head_dim;
    const std::vector<int64_t> shape = {what.tokens, heads, dim};
    const int64_t sets = layer.prompt ? 2 : 8;
    const auto tensor = [&](const std::vector<int64_t>& sizes, DType dtype, const auto& numbers) {
      return std::make_unique<Tensor>(*layer.device, sizes, dtype,
                                      std::as_bytes(std::span(numbers)));
    };
    std::vector<BFloat16> last;
    for (const auto& set : make_queries(*layer.file, sets, what.tokens, layer.seed)) {
      last.clear();
      for (const float x : set) last.push_back(to_bfloat16(x));
      queries_.push_back(tensor(shape, DType::kBF16, last));
    }
    out_ = tensor(shape, DType::kBF16, last);
    lse_ = tensor({what.tokens, heads}, DType::kF32,
                  std::vector<float>(static_cast<size_t>(what.tokens * heads)));
    if (!layer.prompt) {
      indptr_.resize(static_cast<size_t>(what.tokens) + 1);
      std::iota(indptr_.begin(), indptr_.end(), 0);
    }
    sqz_session_options options = session_options(layer, what);
    if (layer.contexts == 0) {
      for (const Index& copy : layer.copies) sessions_.emplace_back(copy, options);
      return;
    }
    options.device_requests = what.tokens;
    sessions_.emplace_back(layer.copies[0], options);
    std::vector<sqz_context> contexts;
    for (int32_t r = 0; r < what.tokens; ++r) {
      contexts.push_back({r % static_cast<int32_t>(layer.contexts), 0, 0});
    }
    for (int64_t c = 1; c < layer.contexts; ++c) {
      sessions_[0].put(c, layer.copies[static_cast<size_t>(c)]);
    }
    contexts_ = layer.device->copy(std::as_bytes(std::span(contexts)));
  }

  void attend(int64_t i) {
    sqz_attend_args args = call(i);
    args.device_contexts = static_cast<const sqz_context*>(contexts_.get());
    if (contexts_ != nullptr) args.indptr = nullptr;
    args.requests = contexts_ == nullptr ? args.requests : 0;
    sessions_[static_cast<size_t>(i) % sessions_.size()].attend(args);
  }
  void reset() {
    for (Session& session : sessions_) session.reset_stats();
  }
  // The counts of the first session stand for all: the shares are the same in each.
  sqz_stats stats() const { return sessions_[0].stats(); }
  // The mean length of the runs that a call selects.
  double keys_a_run() {
    double keys = 0, runs = 0;
    for (const auto& head : sessions_[0].select(call(0), layer_.model().kv_heads)) {
      runs += static_cast<double>(head.size());
      for (const sqz_run& run : head) keys += run.length;
    }
    return keys / std::max(runs, 1.0);
  }

 private:
  sqz_attend_args call(int64_t i) {
    auto args = runtime::make<sqz_attend_args>();
    args.q = queries_[static_cast<size_t>(i) % queries_.size()]->get();
    args.out = out_->get();
    args.lse = lse_->get();
    args.stream = layer_.device->stream();
    if (layer_.file->metadata().buckets > 0) args.q_before_rope = args.q;
    if (!indptr_.empty()) {
      args.indptr = indptr_.data();
      args.requests = std::ssize(indptr_) - 1;
    }
    return args;
  }

  const Layer& layer_;
  std::vector<std::unique_ptr<Tensor>> queries_;
  std::unique_ptr<Tensor> out_, lse_;
  std::vector<int64_t> indptr_;
  std::vector<Session> sessions_;
  std::shared_ptr<void> contexts_;
};

void run(benchmark::State& state, const Layer& layer, const Case& what) {
  Serving serving(layer, what);
  layer.device->time(
      state, layer.prompt ? 2 : 32, [&](int64_t i) { serving.attend(i); },
      [&] { serving.reset(); });
  const sqz_stats stats = serving.stats();
  state.SetLabel(concat(stats.route, stats.dense_fallback ? ", everything read" : ""));
  const auto rate = [&](const char* name, double a_call) {
    state.counters[name] =
        benchmark::Counter(a_call, benchmark::Counter::kIsIterationInvariantRate);
  };
  if (!layer.prompt) {  // dense attention reads everything once for all requests
    const auto selections = static_cast<double>(std::max<uint64_t>(stats.selections, 1));
    rate("bytes_per_s", static_cast<double>(stats.bytes_read) / selections *
                            static_cast<double>(what.dense ? 1 : what.tokens));
  } else {  // products with the keys that are read
    const ModelDescription& model = layer.model();
    const LayerView& view = layer.file->layer(0);
    rate("flop_per_s", 4.0 * static_cast<double>(what.tokens * model.query_heads * model.head_dim) *
                           (static_cast<double>(view.exact) +
                            stats.delivered_keep * static_cast<double>(view.slots)));
  }
  // Every benchmark has the same counters: Google Benchmark's CSV wants that.
  state.counters["keys"] = stats.delivered_keep;
  state.counters["bytes"] = stats.delivered_budget;
  state.counters["keys_a_run"] = serving.keys_a_run();
}

// Opens --index, or makes an index. An index that is not saved is removed once it is open.
Result<std::shared_ptr<Layer>> open_layer(const AttentionOptions& options,
                                          std::shared_ptr<const Device> device) {
  const bool gpu = device->number() >= 0;
  if (options.contexts > 0 && !gpu) {
    return Status(Code::kInvalidArgument, "--contexts: found it on a CPU, expected --device cuda");
  }
  std::string path = options.index.empty() ? options.save_index : options.index;
  std::optional<TemporaryName> temporary;
  if (path.empty()) {
    path = unique_name((std::filesystem::temp_directory_path() / "sqz-bench.").string());
    temporary.emplace(path);
  }
  if (options.index.empty()) SQZ_RETURN_IF_ERROR(make_index(options.made, path));
  const auto layer = std::make_shared<Layer>();
  SQZ_ASSIGN_OR_RETURN(layer->file, SqzFile::open(path));
  const int64_t copies = options.contexts > 0 ? options.contexts : kCopies;
  for (int64_t i = 0; i < (gpu && !options.prompt ? copies : 1); ++i) {
    layer->copies.emplace_back(path);
    if (gpu) layer->copies.back().upload(device->number());
  }
  layer->device = std::move(device);
  layer->prompt = options.prompt;
  layer->contexts = options.contexts;
  layer->threads = options.made.threads;
  layer->seed = options.made.seed;
  return layer;
}

void add(const std::shared_ptr<Layer>& layer, const char* kind, const std::string& sizes,
         const Case& what) {
  const auto body = [layer, what](benchmark::State& state) {
    try {
      run(state, *layer, what);
    } catch (const std::exception& error) {
      fail(state, error.what());
    }
  };
  const std::string name = concat(layer->prompt ? "prefill/" : "attend/", kind, sizes);
  auto* benchmark = benchmark::RegisterBenchmark(name.c_str(), body);
  if (layer->device->number() < 0) {
    benchmark->UseRealTime()->Unit(benchmark::kMillisecond);
  } else {
    benchmark->UseManualTime()->Unit(benchmark::kMicrosecond)->Iterations(20);
  }
}

// Rules and levels are left out for an index without clusters.
void add_selectors(const AttentionOptions& options, const std::shared_ptr<Layer>& layer,
                   const std::string& size, Case what) {
  const bool clusters = layer->file->layer(0).levels > 0;
  what.dense = false;
  for (const double keep : options.keep) {
    what.keep = keep;
    const std::string asked = concat("/keep:", keep);
    if (!clusters) add(layer, "sparse", asked + size, what);
    for (const std::string& rule : clusters ? options.rules : std::vector<std::string>()) {
      for (const int levels : options.levels) {
        what.rule = rule == "budget" ? SQZ_RULE_BUDGET : SQZ_RULE_THRESHOLD;
        what.levels = levels;
        add(layer, "sparse", concat(asked, "/rule:", rule, "/levels:", levels, size), what);
      }
    }
  }
}

}  // namespace

Status add_attention(const AttentionOptions& options, std::shared_ptr<const Device> device) {
  SQZ_ASSIGN_OR_RETURN(const auto layer, open_layer(options, std::move(device)));
  const IndexMetadata& metadata = layer->file->metadata();
  benchmark::AddCustomContext("keys", options.index.empty() ? "made up" : options.index);
  benchmark::AddCustomContext(
      "layer", concat(metadata.tokens, " tokens, ", metadata.model.query_heads, " query heads, ",
                      metadata.model.kv_heads, " KV heads of ", metadata.model.head_dim,
                      " dimensions, ", dtype_name(layer->file->layer(0).dtype)));
  for (const int64_t tokens : options.prompt ? options.queries : options.requests) {
    Case what;
    what.tokens = tokens;
    const std::string size = concat(options.prompt ? "/queries:" : "/requests:", tokens);
    add(layer, "dense", size, what);
    if (!options.prompt) add_selectors(options, layer, size, what);
    for (const int64_t block : options.prompt ? options.block : std::vector<int64_t>()) {
      what.block = block;
      add_selectors(options, layer, concat(size, "/block:", block), what);
    }
  }
  return {};
}

}  // namespace sqz::bench
