// Positions in device memory, which a graph reads again, against float64, and shapes without
// kernels.
#include "libindex/builder.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kTokens = 500;

LayerGeometry full(int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t value_dim) {
  return {.query_heads = query_heads,
          .kv_heads = kv_heads,
          .head_dim = dim,
          .value_dim = value_dim,
          .attention_scale = 1.3 / std::sqrt(static_cast<double>(dim))};
}

// The first layer is clustered, as the model says.
std::shared_ptr<const ServedIndex> build(const std::vector<LayerGeometry>& layers) {
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
  options.dtype = DType::kBF16;
  const std::vector<int32_t> ids(kTokens, 1);
  auto builder = IndexBuilder::create(Env::posix(), path, true, model, ids, "", options);
  EXPECT_TRUE(builder.ok()) << builder.status().message();
  for (int64_t l = 0; l < model.layers; ++l) {
    const LayerGeometry& own = layers[static_cast<size_t>(l)];
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

class Geometry : public test::OnGpu {};

// Sessions of single tokens have the memory for it, too; a graph serves the next positions.
TEST_F(Geometry, GraphsReadPositions) {
  LayerGeometry layer = full(32, 2, 64, 64);
  layer.kind = LayerKind::kRecent;
  layer.window = 128;
  const auto index = build({full(16, 1, 128, 128), layer});
  const LayerView& view = index->layers[1];
  const auto gpu =
      test::gpu_session({{}, index}, {.selector = SelectorKind::kDense}, {.max_request_tokens = 1});
  test::DeviceCall call(layer, 1, test::single_tokens(3), DType::kBF16);
  const auto queries =
      testing::rounded(DType::kBF16, testing::Random(7).normals(3 * 32 * 64, 1.5f));
  call.set_queries(queries);
  const test::DeviceArray<int64_t> on_device(std::vector<int64_t>(3, kTokens));
  call.call.device_positions = on_device.get();
  const auto graph = test::captured(*gpu, call.call);
  for (const int64_t first : {kTokens, kTokens + 60, kTokens + 127, kTokens + 500}) {
    SCOPED_TRACE(first);
    const int64_t positions[] = {first, first + 20, first + 40};
    ASSERT_EQ(cudaMemcpy(on_device.get(), positions, sizeof(positions), cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // before what other streams read
    graph.replay();
    testing::Output expected;
    for (int64_t row = 0; row < 3 * 32; ++row) {
      reference::Attention attention(queries.data() + row * 64, view, layer.attention_scale);
      const int64_t unseen = layer.first_seen(positions[row / 32]) - (kTokens - view.exact);
      for (int64_t e = std::max<int64_t>(unseen, 0); e < view.exact; ++e) {
        attention.add(view.exact_keys, view.exact_values, row % 32 / 16 * view.exact + e);
      }
      const reference::State state = attention.state();
      expected.out.insert(expected.out.end(), state.out.begin(), state.out.end());
      expected.lse.push_back(static_cast<float>(state.lse));
    }
    test::expect_rows_close(call.output(), expected, 64);
  }
  call.call.device_positions = nullptr;
  EXPECT_EQ(gpu->attend(call.call).code(), Code::kInvalidArgument);
}

TEST_F(Geometry, ShapesWithoutKernelsAreRefused) {
  for (const LayerGeometry& layer :
       {full(17, 1, 128, 128), full(4, 2, 72, 72), full(4, 2, 128, 64)}) {
    const auto index = build({layer});
    SessionOptions options;
    options.selection.selector = SelectorKind::kDense;
    const auto session = create_session(index, test::uploaded({{}, index}), options);
    EXPECT_EQ(session.status().code(), Code::kUnsupported);
  }
}

}  // namespace
}  // namespace sqz::cuda
