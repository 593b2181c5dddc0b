#include "libindex/builder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <future>
#include <utility>

#include "formats/base/hash.h"
#include "formats/base/parallel.h"
#include "formats/base/stopwatch.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"
#include "libindex/calibrate.h"
#include "libindex/calibration_scorer.h"
#include "libindex/layer_engine.h"
#include "libindex/layer_store.h"
#include "libindex/layout.h"
#include "libindex/order.h"
#include "libindex/tree.h"

namespace sqz {
namespace {

// Adds the time of a scope to a total.
class Timer {
 public:
  explicit Timer(double& total) : total_(total) {}
  ~Timer() { total_ += watch_.seconds(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& total_;
  Stopwatch watch_;
};

constexpr const char* kNoMemory = "not enough memory to build the index";

class Builder final : public IndexBuilder {
 public:
  Builder(BuildLayout layout, const BuildOptions& options, std::unique_ptr<KmeansEngine> engine)
      : layout_(std::move(layout)),
        model_(layout_.metadata.model),
        options_(options),
        threads_(resolve_threads(options.threads)),
        engine_(std::move(engine)),
        stores_{{{0, 0, 0, options.dtype}, {0, 0, 0, options.dtype}}},
        compressor_(layout_.metadata) {
    calibration_ = calibration_input(layout_.metadata, kTailSource);
    const auto coarse_levels = static_cast<double>(std::ssize(options.level_fractions) - 1);
    if (coarse_levels > 0) {
      calibration_.coarse_keep = std::pow(options.coarse_keep, 1 / coarse_levels);
    }
    report_ = layout_.report();
    if (engine_ != nullptr) report_.engine = engine_->name();
    for (const auto& layer : layout_.metadata.state) state_left_ += std::ssize(layer);
    skip_layers();
  }

  const BuildOptions& options() const override { return options_; }

  Result<BuildPlan> plan(bool on_device) const override {
    BuildPlan plan;
    SQZ_ASSIGN_OR_RETURN(plan.bytes,
                         SqzWriter::planned_bytes(layout_.metadata, layout_.cluster_counts));
    plan.peak_memory = peak_memory(layout_, options_);
    plan.clusters = report_.clusters;
    plan.pages = report_.pages;
    if (!takes_device_rows()) return plan;
    const auto& layers = layout_.metadata.layers;
    const auto sparse = std::find_if(layers.begin(), layers.end(),
                                     [](const LayerPolicy& layer) { return !layer.dense; });
    const DeviceRows rows;
    LayerInput input;
    input.device = on_device ? &rows : nullptr;
    const LayerProblem problem =
        layer_problem(sparse == layers.end() ? 0 : sparse - layers.begin(), input);
    SQZ_ASSIGN_OR_RETURN(const LayerMemory memory, layer_engine()->memory(problem));
    plan.gpu_memory = memory.whole;
    plan.gpu_memory_least = memory.least;
    return plan;
  }

  Result<BuildReport> find(Env& env, const std::string& path) const override {
    SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path, OpenMode::kMmap, env));
    SQZ_ASSIGN_OR_RETURN(const Calibration calibration, file->calibration());
    if (build_id(file->raw_metadata(), calibration.source) == report_.build_id) {
      BuildReport report = report_;
      report.bytes = file->file_bytes();
      return report;
    }
    SQZ_RETURN_IF_ERROR(
        check_same_build(file->raw_metadata(), metadata_to_strings(layout_.metadata), path));
    return Refuse{path, Code::kMismatch}("calibration", concat('"', calibration.source, '"'),
                                         kTailSource);
  }

  Status begin(Env& env, const std::string& path, bool replace) override {
    if (writer_ != nullptr) return ended();
    return within_memory(
        [&]() -> Status {
          SQZ_ASSIGN_OR_RETURN(writer_, SqzWriter::create(env, path, replace, layout_.metadata,
                                                          layout_.cluster_counts));
          return {};
        },
        kNoMemory);
  }

  bool takes_device_rows() const override { return layer_engine() != nullptr; }

  int64_t next_layer() const override { return next_layer_; }

  Status add_state(int64_t layer, const StateTensor& tensor) override {
    if (!usable_ || writer_ == nullptr) return ended();
    usable_ = false;
    SQZ_RETURN_IF_ERROR(written());
    SQZ_RETURN_IF_ERROR(writer_->write_state(layer, tensor));
    --state_left_;
    usable_ = true;
    return {};
  }

  Status add_layer(int64_t layer, const LayerInput& input,
                   const std::function<void(int64_t, int64_t)>& progress) override {
    if (!usable_ || writer_ == nullptr) return ended();
    usable_ = false;
    SQZ_RETURN_IF_ERROR(within_memory([&] { return add(layer, input, progress); }, kNoMemory));
    usable_ = true;
    return Status();
  }

  Result<BuildReport> finish() override {
    if (!usable_ || writer_ == nullptr) return ended();
    usable_ = false;
    return within_memory([&] { return calibrate_and_publish(); }, kNoMemory);
  }

 private:
  static Status ended() {
    return Status(Code::kInvalidArgument,
                  "the build was not begun, has failed or was finished before");
  }

  LayerGeometry geometry(int64_t layer) const { return model_.layer(layer); }

  void skip_layers() {
    while (next_layer_ < model_.layers && !geometry(next_layer_).has_keys()) ++next_layer_;
  }

  // Null where the host makes the layers: engines on a GPU take values as wide as keys.
  LayerEngine* layer_engine() const {
    for (const LayerGeometry& layer : model_.geometry) {
      if (layer.value_dim != layer.head_dim) return nullptr;
    }
    return engine_ != nullptr ? engine_->layer_engine() : nullptr;
  }

  // The tokens that are given of a layer: all, or those that a recent one stores.
  int64_t given_tokens(int64_t layer, const LayerInput& input) const {
    const LayerGeometry own = geometry(layer);
    const int64_t floats =
        input.device != nullptr ? input.device->head_stride : std::ssize(input.keys) / own.kv_heads;
    const int64_t tokens = layout_.metadata.tokens;
    return floats == 0 ? tokens : std::min(floats / own.head_dim, tokens);
  }

  Status check_input(int64_t layer, const LayerInput& input) {
    if (layer != next_layer_ || layer >= model_.layers) {
      return Refuse{"build", Code::kInvalidArgument}(
          "layer", layer, concat(next_layer_, " of ", model_.layers, ", in order"));
    }
    if (input.device != nullptr) {
      if (takes_device_rows() && input.device->device == options_.gpu) return Status();
      return Status(Code::kInvalidArgument,
                    concat("layer ", layer, ": keys on CUDA device ", input.device->device,
                           " were given to engine ", report_.engine, " on device ", options_.gpu));
    }
    const LayerGeometry own = geometry(layer);
    const int64_t tokens = layout_.metadata.tokens, row = own.kv_heads * own.head_dim;
    const int64_t given = std::ssize(input.keys) / row;
    const bool recent = own.kind == LayerKind::kRecent;
    const int64_t least = recent ? layout_.shape(layer).exact : tokens;
    if (given >= least && given <= tokens && std::ssize(input.keys) == given * row &&
        std::ssize(input.values) == given * own.kv_heads * own.value_dim) {
      return {};
    }
    return Refuse{concat("layer ", layer), Code::kInvalidArgument}(
        "elements of keys and values", concat(input.keys.size(), " and ", input.values.size()),
        concat(recent ? "at most " : "", row * tokens, " and ",
               own.kv_heads * tokens * own.value_dim,
               recent ? concat(", of ", least, " tokens at least") : ""));
  }

  Status check_values(int64_t layer, const LayerInput& input) {
    const LayerGeometry own = geometry(layer);
    SQZ_RETURN_IF_ERROR(check_storable(input.keys, own.kv_heads, own.head_dim, options_.dtype,
                                       layer, "KV head", "key", threads_));
    return check_storable(input.values, own.kv_heads, own.value_dim, options_.dtype, layer,
                          "KV head", "value", threads_);
  }

  Status add(int64_t layer, const LayerInput& input,
             const std::function<void(int64_t, int64_t)>& progress) {
    SQZ_RETURN_IF_ERROR(check_input(layer, input));
    const bool sparse = !layout_.metadata.layers[layer].dense;
    store().begin(geometry(layer), given_tokens(layer, input));
    if (sparse && engine_ != nullptr) {
      SQZ_RETURN_IF_ERROR(take_queries(layer, input));
      SQZ_RETURN_IF_ERROR(cluster(layer, input, progress));
    } else {
      SQZ_RETURN_IF_ERROR(!sparse             ? store_dense(layer, input)
                          : layout_.pages > 0 ? store_pages(layer, input)
                                              : store_buckets(layer, input));
      if (progress) progress(geometry(layer).kv_heads, geometry(layer).kv_heads);
    }
    if (sparse && layout_.metadata.heavy_hitters) {
      SQZ_RETURN_IF_ERROR(check_attention(layer, input.attention));
      store().order_heavy(input.attention);
    }
    SQZ_RETURN_IF_ERROR(written());
    const Timer timer(report_.seconds.write);
    LayerView data = layout_.shape(layer);
    store().point(data);
    SQZ_RETURN_IF_ERROR(compressor_.compress(layer, data, threads_));
    // Where no thread can be had, written() writes.
    writing_ = std::async(std::launch::async | std::launch::deferred,
                          [this, layer, data] { return writer_->write_layer(layer, data); });
    ++next_layer_;
    ++added_;
    skip_layers();
    return Status();
  }

  // Once the last layer is in the file.
  Status written() {
    const Timer timer(report_.seconds.write);
    return writing_.valid() ? writing_.get() : Status();
  }

  Status store_pages(int64_t layer, const LayerInput& input) {
    const Timer timer(report_.seconds.cluster);
    SQZ_RETURN_IF_ERROR(check_values(layer, input));
    return store().fill_pages(input.keys.data(), input.values.data(), options_.sink,
                              layout_.clustered, options_.page_size, threads_);
  }

  Status check_attention(int64_t layer, std::span<const float> attention) const {
    const std::string label = concat("layer ", layer);
    const int64_t wanted = model_.kv_heads * layout_.metadata.tokens;
    if (std::cmp_not_equal(attention.size(), wanted)) {
      return Refuse{label, Code::kInvalidArgument}("elements of attention", attention.size(),
                                                   wanted);
    }
    return check_storable(attention, model_.kv_heads, 1, DType::kF32, layer, "KV head", "attention",
                          threads_);
  }

  Status store_buckets(int64_t layer, const LayerInput& input) {
    const Timer timer(report_.seconds.cluster);
    SQZ_RETURN_IF_ERROR(check_values(layer, input));
    SQZ_ASSIGN_OR_RETURN(const BucketOrder order,
                         order_by_bucket(*options_.qmodel, layer,
                                         {input.keys, layout_.metadata.tokens, options_.sink,
                                          layout_.clustered, options_.dtype},
                                         threads_));
    return store().fill_buckets(input.keys.data(), input.values.data(), order,
                                options_.qmodel->layers[static_cast<size_t>(layer)], options_.sink,
                                threads_);
  }

  Status take_queries(int64_t layer, const LayerInput& input) {
    const int64_t row = model_.query_heads * model_.head_dim;
    const auto floats = static_cast<int64_t>(input.queries.size());
    const int64_t n = calibration_.sparse.empty() ? floats / row : calibration_.queries;
    if (n < 1 || floats != n * row) {
      return Refuse{concat("layer ", layer), Code::kInvalidArgument}(
          "elements of queries", floats,
          concat("a multiple of ", row, ", the same for all layers"));
    }
    SQZ_RETURN_IF_ERROR(check_storable(input.queries, model_.query_heads, model_.head_dim,
                                       DType::kF32, layer, "query head", "query", 1));
    calibration_.queries = n;
    CalibrationLayer& kept = calibration_.sparse.emplace_back();
    kept.layer = layer;
    kept.queries = group_queries(input.queries.data(), model_.kv_heads, model_.group_size(), n,
                                 model_.head_dim);
    return Status();
  }

  Status cluster(int64_t layer, const LayerInput& input,
                 const std::function<void(int64_t, int64_t)>& progress) {
    const Timer timer(report_.seconds.cluster);
    if (LayerEngine* engine = layer_engine()) {
      SQZ_RETURN_IF_ERROR(engine->fill(layer_problem(layer, input), progress, store().buffers()));
    } else {
      SQZ_RETURN_IF_ERROR(cluster_on_host(layer, input, progress));
    }
    for (const LayerBuffers::Level& level : store().buffers().levels) {
      calibration_.sparse.back().levels.push_back({level.centroids, level.offsets});
    }
    return Status();
  }

  TreeOptions tree_options(int64_t layer) const {
    return {layout_.cluster_counts[layer], options_.iterations, options_.seed, layer, threads_};
  }

  LayerProblem layer_problem(int64_t layer, const LayerInput& input) const {
    const bool dense = layout_.cluster_counts[layer].empty();
    LayerProblem problem;
    const LayerGeometry own = geometry(layer);
    problem.heads = own.kv_heads;
    problem.tokens = dense ? given_tokens(layer, input) : layout_.metadata.tokens;
    problem.dim = own.head_dim;
    problem.sink = dense ? problem.tokens - layout_.shape(layer).exact : options_.sink;
    problem.clustered = dense ? 0 : layout_.clustered;
    problem.tree = tree_options(layer);
    problem.dtype = options_.dtype;
    problem.keys = input.keys;
    problem.values = input.values;
    problem.device = input.device;
    return problem;
  }

  Status store_dense(int64_t layer, const LayerInput& input) {
    const Timer timer(report_.seconds.write);
    if (input.device != nullptr) {
      return layer_engine()->fill(layer_problem(layer, input), {}, store().buffers());
    }
    SQZ_RETURN_IF_ERROR(check_values(layer, input));
    const int64_t first = given_tokens(layer, input) - layout_.shape(layer).exact;
    return store().fill_dense(input.keys.data(), input.values.data(), first, threads_);
  }

  Status cluster_on_host(int64_t layer, const LayerInput& input,
                         const std::function<void(int64_t, int64_t)>& progress) {
    SQZ_RETURN_IF_ERROR(check_values(layer, input));
    const int64_t heads = model_.kv_heads, dim = model_.head_dim, tokens = layout_.metadata.tokens;
    std::vector<const float*> keys;
    for (int64_t h = 0; h < heads; ++h) {
      keys.push_back(input.keys.data() + (h * tokens + options_.sink) * dim);
    }
    std::vector<SlotOrder> orders(static_cast<size_t>(heads));
    {
      SQZ_ASSIGN_OR_RETURN(
          const std::vector<HeadTree> trees,
          build_trees(*engine_, keys, layout_.clustered, dim, tree_options(layer), progress));
      SQZ_RETURN_IF_ERROR(parallel_for(heads, threads_, [&](int64_t h) {
        orders[h] = depth_first_order(trees[h], dim);
        return Status();
      }));
    }
    return store().fill_sparse(input.keys.data(), input.values.data(), orders, options_.sink,
                               threads_);
  }

  Result<BuildReport> calibrate_and_publish() {
    if (next_layer_ != model_.layers) {
      return Refuse{"build", Code::kInvalidArgument}("layers added", next_layer_, model_.layers);
    }
    if (state_left_ != 0) {
      return Refuse{"build", Code::kInvalidArgument}("state", concat(state_left_, " tensors left"),
                                                     "each that was declared, once");
    }
    SQZ_RETURN_IF_ERROR(written());
    Calibration calibration;
    if (engine_ != nullptr) {
      const Timer timer(report_.seconds.calibrate);
      LayerEngine* engine = layer_engine();
      const auto scorer = engine != nullptr ? engine->calibration_scorer(calibration_)
                                            : make_cpu_calibration_scorer(calibration_, threads_);
      SQZ_ASSIGN_OR_RETURN(calibration, calibrate(calibration_, *scorer));
    }
    {
      const Timer timer(report_.seconds.write);
      SQZ_ASSIGN_OR_RETURN(report_.bytes, writer_->commit(calibration));
    }
    return report_;
  }

  // The store of the layer that is made now. The layer before is being written from the other
  // store.
  LayerStore& store() { return stores_[static_cast<size_t>(added_ % 2)]; }

  const BuildLayout layout_;
  const ModelDescription& model_;
  const BuildOptions options_;
  const int threads_;
  std::unique_ptr<KmeansEngine> engine_;
  std::unique_ptr<SqzWriter> writer_;  // null before begin()
  std::array<LayerStore, 2> stores_;
  LayerCompressor compressor_;
  CalibrationInput calibration_;
  BuildReport report_;
  int64_t next_layer_ = 0, added_ = 0;  // layers
  int64_t state_left_ = 0;              // tensors
  bool usable_ = true;
  std::future<Status> writing_;  // last: its end is waited for before what it reads goes
};

}  // namespace

Result<std::unique_ptr<IndexBuilder>> IndexBuilder::prepare(const ModelDescription& model,
                                                            std::span<const int32_t> tokens,
                                                            const std::string& tokenizer_hash,
                                                            const BuildOptions& options) {
  const auto make = [&]() -> Result<std::unique_ptr<IndexBuilder>> {
    std::unique_ptr<KmeansEngine> engine;
    if (options.partition == Partition::kKmeans) {
      SQZ_ASSIGN_OR_RETURN(engine,
                           make_kmeans_engine({options.engine, model.head_dim, options.gpu}));
    }
    SQZ_ASSIGN_OR_RETURN(BuildLayout layout,
                         plan_layout(model, std::ssize(tokens), options,
                                     engine == nullptr ? "none" : engine->name()));
    layout.metadata.tokenizer_hash = tokenizer_hash;
    layout.metadata.tokens_hash = hex(xxh3_64(std::as_bytes(tokens)));
    layout.metadata.producer = producer_name();
    return std::unique_ptr<IndexBuilder>(
        new Builder(std::move(layout), options, std::move(engine)));
  };
  return within_memory(make, kNoMemory);
}

Result<std::unique_ptr<IndexBuilder>> IndexBuilder::create(Env& env, const std::string& path,
                                                           bool replace,
                                                           const ModelDescription& model,
                                                           std::span<const int32_t> tokens,
                                                           const std::string& tokenizer_hash,
                                                           const BuildOptions& options) {
  SQZ_ASSIGN_OR_RETURN(auto builder, prepare(model, tokens, tokenizer_hash, options));
  SQZ_RETURN_IF_ERROR(builder->begin(env, path, replace));
  return builder;
}

}  // namespace sqz
