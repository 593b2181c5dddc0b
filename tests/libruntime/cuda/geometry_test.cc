// Layers of different shapes, windows and chunks on the GPU against float64.
#include "libindex/builder.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda {
namespace {

using test::DeviceArray;

constexpr int64_t kTokens = 500;

LayerGeometry full(int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t value_dim) {
  return {.query_heads = query_heads,
          .kv_heads = kv_heads,
          .head_dim = dim,
          .value_dim = value_dim,
          .attention_scale = 1.3 / std::sqrt(static_cast<double>(dim))};
}
LayerGeometry recent(LayerGeometry layer, int64_t window, int64_t chunk) {
  layer.kind = LayerKind::kRecent;
  layer.window = window;
  layer.chunk = chunk;
  return layer;
}

// The first layer is clustered, as the model says.
std::shared_ptr<const ServedIndex> build(const std::vector<LayerGeometry>& layers, DType dtype,
                                         RowKind rows = RowKind::k16) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("layers.sqz");
  const LayerGeometry& first = layers[0];
  ModelDescription model =
      testing::tiny_model(std::ssize(layers), first.query_heads, first.kv_heads, first.head_dim);
  model.attention_scale = first.attention_scale;
  model.geometry = layers;
  for (size_t l = 0; l < layers.size(); ++l) model.sliding_window[l] = layers[l].window;
  BuildOptions options;
  options.tail = 20;
  options.level_fractions = {0.06};
  options.threads = 2;
  options.engine = "faiss";
  options.dtype = dtype;
  options.compress.rows = rows;
  const std::vector<int32_t> ids(kTokens, 1);
  auto builder = IndexBuilder::create(Env::posix(), path, true, model, ids, "", options);
  EXPECT_TRUE(builder.ok()) << builder.status().message();
  for (int64_t l = 0; l < model.layers; ++l) {
    const LayerGeometry& own = layers[static_cast<size_t>(l)];
    if (!own.has_keys()) continue;
    const auto seed = static_cast<uint64_t>(l + 1);
    const int64_t keys = own.kv_heads * kTokens;
    testing::Random random(seed);
    const Status added = (*builder)->add_layer(
        l, {.keys = sqz::test::clustered_points(keys, own.head_dim, 12, 0.5f, seed),
            .values = random.normals(keys * own.value_dim),
            .queries = random.normals(own.query_heads * options.tail * own.head_dim)});
    EXPECT_TRUE(added.ok()) << added.message();
  }
  EXPECT_TRUE((*builder)->finish().ok());
  auto index = make_served_index(*SqzFile::open(path, OpenMode::kRead));
  EXPECT_TRUE(index.ok()) << index.status().message();
  return *index;
}

// A call whose positions are known, and what must come of it.
class Call : public test::DeviceCall {
 public:
  Call(const LayerGeometry& layer, int64_t number, const test::Lengths& lengths, DType dtype)
      : DeviceCall(layer, number, lengths, dtype),
        layer_(layer),
        queries_(testing::rounded(
            dtype,
            testing::Random(7).normals(call.tokens * layer.query_heads * layer.head_dim, 1.5f))),
        on_device_(static_cast<size_t>(call.tokens)) {
    set_queries(queries_);
  }

  // Of the first token of each request. `device`: in device memory, not on the host.
  void set_positions(int64_t first, bool device) {
    positions_.clear();
    const std::vector<int64_t>& indptr = options().indptr;
    for (size_t r = 0; r + 1 < indptr.size(); ++r) {
      for (int64_t t = indptr[r]; t < indptr[r + 1]; ++t) {
        positions_.push_back(first + static_cast<int64_t>(r) * 20 + t - indptr[r]);
      }
    }
    call.positions = device ? nullptr : positions_.data();
    call.device_positions = device ? on_device_.get() : nullptr;
    EXPECT_EQ(cudaMemcpy(on_device_.get(), positions_.data(), positions_.size() * sizeof(int64_t),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // before what other streams read
  }

  // Compares with attention over all exact keys that a token may see, and the slots in `runs` of
  // its KV head, in double precision.
  void check(const LayerView& view, const std::vector<std::vector<KeyRun>>& runs) const {
    testing::Output expected;
    for (int64_t row = 0; row < call.tokens * layer_.query_heads; ++row) {
      const int64_t head = row % layer_.query_heads / layer_.group_size();
      reference::Attention attention(queries_.data() + row * layer_.head_dim, view,
                                     layer_.attention_scale);
      int64_t first = 0;  // exact key
      if (layer_.kind == LayerKind::kRecent) {
        const int64_t position = positions_[static_cast<size_t>(row / layer_.query_heads)];
        first = std::max<int64_t>(layer_.first_seen(position) - (kTokens - view.exact), 0);
      }
      for (int64_t e = first; e < view.exact; ++e) {
        attention.add(view.exact_keys, view.exact_values, head * view.exact + e);
      }
      for (const KeyRun& run : runs[static_cast<size_t>(head)]) {
        for (int64_t i = 0; i < run.length; ++i) {
          attention.add(view.keys, view.values, head * view.slots + run.first + i);
        }
      }
      const reference::State state = attention.state();
      expected.out.insert(expected.out.end(), state.out.begin(), state.out.end());
      expected.lse.push_back(static_cast<float>(state.lse));
    }
    test::expect_rows_close(output(), expected, layer_.value_dim);
  }

 private:
  LayerGeometry layer_;
  std::vector<float> queries_;  // [T, Hq, d]
  std::vector<int64_t> positions_;
  DeviceArray<int64_t> on_device_;
};

std::unique_ptr<ServingSession> session_of(const std::shared_ptr<const ServedIndex>& index,
                                           const SelectionRequest& selection,
                                           int64_t max_request_tokens = 0) {
  return test::gpu_session({{}, index}, selection, {.max_request_tokens = max_request_tokens});
}

class Geometry : public test::OnGpu {};

const test::Lengths kCalls[] = {{1}, {1, 1, 1, 1, 1}, {17, 1, 0, 29}};

TEST_F(Geometry, LayersOfDifferentShapes) {
  const std::vector<LayerGeometry> layers = {
      full(24, 2, 192, 128),
      recent(full(8, 4, 64, 64), 70, 0),
      {.kind = LayerKind::kState},
      recent(full(16, 1, 512, 512), 0, 128),
      full(10, 1, 80, 80),
      full(16, 8, 128, 128),
      recent(full(6, 3, 256, 256), 2000, 0),
  };
  for (const DType stored : {DType::kBF16, DType::kF16}) {
    const auto index = build(layers, stored);
    SelectionRequest selecting, dense;
    selecting.keep = 0.15;
    selecting.rule = RuleKind::kBudget;
    dense.selector = SelectorKind::kDense;
    for (const SelectionRequest& selection : {selecting, dense}) {
      const auto gpu = session_of(index, selection);
      ASSERT_NE(gpu, nullptr);
      for (int64_t l = 0; l < std::ssize(layers); ++l) {
        const LayerGeometry& own = layers[static_cast<size_t>(l)];
        // Layers that are not clustered are read whole in any case.
        if (!own.has_keys() || (l > 0 && selection.keep > 0)) continue;
        for (const test::Lengths& lengths : kCalls) {
          for (const DType dtype : {DType::kF32, stored}) {
            for (const int64_t first : {kTokens, kTokens + 45, kTokens + 150}) {
              if (own.kind == LayerKind::kFull && first > kTokens) continue;
              SCOPED_TRACE(concat("layer ", l, ", ", lengths.size(), " requests from ", first, ", ",
                                  dtype_name(dtype), ", stored ", dtype_name(stored)));
              const LayerView& view = index->layers[static_cast<size_t>(l)];
              Call call(own, l, lengths, dtype);
              call.set_positions(first, lengths.size() % 2 == 1);
              const bool chosen = gpu->plan().selects(l);
              // Only the first block's selection is told.
              if (chosen && call.call.tokens > 1) continue;
              ASSERT_TRUE(gpu->attend(call.call).ok());
              call.check(view, test::runs_of(*gpu, call.call));
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Sessions of single tokens have the memory for it, too; a graph serves the next positions.
TEST_F(Geometry, GraphsReadPositions) {
  const LayerGeometry layer = recent(full(32, 2, 64, 64), 128, 0);
  const auto index = build({full(16, 1, 128, 128), layer}, DType::kBF16);
  const auto gpu = session_of(index, {.selector = SelectorKind::kDense}, 1);
  Call call(layer, 1, test::single_tokens(3), DType::kBF16);
  call.set_positions(kTokens, true);
  const auto graph = test::captured(*gpu, call.call);
  for (const int64_t first : {kTokens, kTokens + 60, kTokens + 127, kTokens + 500}) {
    SCOPED_TRACE(first);
    call.set_positions(first, true);
    graph.replay();
    call.check(index->layers[1], std::vector<std::vector<KeyRun>>(2));
  }
  call.call.device_positions = nullptr;
  EXPECT_EQ(gpu->attend(call.call).code(), Code::kInvalidArgument);
}

// Groups above 8 share a reading of keys between many requests, and rows of 8 bits.
TEST_F(Geometry, WideGroups) {
  for (const RowKind rows : {RowKind::k16, RowKind::kQ8}) {
    for (const auto& [dim, group] : {std::pair<int64_t, int64_t>{128, 16}, {256, 10}, {160, 12}}) {
      const LayerGeometry layer = full(2 * group, 2, dim, dim);
      const auto index = build({layer}, DType::kF16, rows);
      const auto gpu = session_of(index, {.selector = SelectorKind::kDense});
      for (const int64_t requests : {1, 3, 17}) {
        SCOPED_TRACE(concat(rows_name(rows), ", dim ", dim, ", group ", group, ", ", requests));
        Call call(layer, 0, test::single_tokens(requests), DType::kF16);
        ASSERT_TRUE(gpu->attend(call.call).ok());
        if (rows != RowKind::k16) continue;  // compared with the CPU in serving_test
        call.check(index->layers[0], test::runs_of(*gpu, call.call));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Geometry, ShapesWithoutKernelsAreRefused) {
  for (const LayerGeometry& layer :
       {full(17, 1, 128, 128), full(4, 2, 72, 72), full(4, 2, 128, 64)}) {
    const auto index = build({layer}, DType::kBF16);
    SessionOptions options;
    options.selection.selector = SelectorKind::kDense;
    const auto session = create_session(index, test::uploaded({{}, index}), options);
    EXPECT_EQ(session.status().code(), Code::kUnsupported);
  }
}

}  // namespace
}  // namespace sqz::cuda
