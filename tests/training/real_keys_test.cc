// The whole path on a trained model's keys and queries: a dense pass over a book, an index of it,
// and a dense session whose states equal the float64 reference's.
#include "formats/tokenizer.h"
#include "libindex/builder.h"
#include "tests/libruntime/served_index.h"
#include "tests/training/golden.h"

namespace sqz {
namespace {

constexpr int64_t kTokens = 1500;  // of the fixed context
constexpr int64_t kQuestion = 24;  // tokens after it, whose queries are asked

// One layer of the dense pass, float32.
struct RealLayer {
  std::vector<float> keys, values;  // [Hkv, kTokens, d]
  std::vector<float> queries;       // [kQuestion, Hq, d]
};

struct RealContext {
  std::vector<RealLayer> layers;
  testing::Served served;
};

std::vector<int32_t> book_tokens() {
  const auto tokenizer = Tokenizer::load(concat(nano_folder(), "/tokenizer.json"));
  const auto file = Env::posix().open_read(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
  std::string text(20000, '\0');
  EXPECT_TRUE((*file)->read(200000, std::as_writable_bytes(std::span(text))).ok());
  std::vector<int32_t> ids;
  const Status status = (*tokenizer)->encode(text, true, ids);
  EXPECT_TRUE(status.ok()) << status.message();
  ids.resize(kTokens + kQuestion);
  return ids;
}

// Of each head of [heads, n, d]: `count` tokens from `first` on.
std::vector<float> cut(std::span<const float> x, int64_t heads, int64_t dim, int64_t first,
                       int64_t count) {
  std::vector<float> out;
  const int64_t stride = std::ssize(x) / heads;
  for (int64_t h = 0; h < heads; ++h) {
    const auto part = x.subspan(h * stride + first * dim, count * dim);
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

// [heads, n, d] -> [n, heads, d]
std::vector<float> by_token(const std::vector<float>& x, int64_t heads, int64_t dim) {
  const int64_t tokens = std::ssize(x) / heads / dim;
  std::vector<float> out(x.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(&x[(h * tokens + t) * dim], dim, &out[(t * heads + h) * dim]);
    }
  }
  return out;
}

void make_context(RealContext& out) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("book.sqz");
  const auto ids = book_tokens();
  auto runner = Runner::load(nano_folder(), {.device = "cpu", .dtype = DType::kF32, .threads = 2});
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  const ModelDescription& model = (*runner)->config().description;
  BuildOptions build;
  auto builder = IndexBuilder::create(Env::posix(), path, false, model,
                                      std::span(ids).first(kTokens), "", build);
  ASSERT_TRUE(builder.ok()) << builder.status().message();

  PrefillOptions pass;
  for (int64_t p = kTokens - build.tail; p < std::ssize(ids); ++p)
    pass.query_positions.push_back(p);
  pass.consumer = [&](const LayerCapture& layer) -> Status {
    const int64_t d = model.head_dim;
    RealLayer real{cut(layer.keys, model.kv_heads, d, 0, kTokens),
                   cut(layer.values, model.kv_heads, d, 0, kTokens),
                   by_token(cut(layer.queries, model.query_heads, d, build.tail, kQuestion),
                            model.query_heads, d)};
    const auto calibration = cut(layer.queries, model.query_heads, d, 0, build.tail);
    SQZ_RETURN_IF_ERROR((*builder)->add_layer(layer.layer, {real.keys, real.values, calibration}));
    out.layers.push_back(std::move(real));
    return {};
  };
  const Status done = (*runner)->prefill(ids, pass);
  ASSERT_TRUE(done.ok()) << done.message();
  const auto report = (*builder)->finish();
  ASSERT_TRUE(report.ok()) << report.status().message();
  const auto file = SqzFile::open(path, OpenMode::kRead);
  ASSERT_TRUE(file.ok()) << file.status().message();
  out.served.index = *make_served_index(*file);
  out.served.options = {.layers = model.layers,
                        .query_heads = model.query_heads,
                        .kv_heads = model.kv_heads,
                        .head_dim = model.head_dim,
                        .tokens = kTokens};
}

// The file's permuted keys against the dense pass's, in token order.
TEST(RealKeys, DenseStatesAreThoseOfTheModelsOwnKeys) {
  RealContext context;
  make_context(context);
  const testing::Served& served = context.served;
  SessionOptions options;
  options.selection = {.selector = SelectorKind::kDense};
  options.max_tokens = kQuestion;
  options.threads = 2;
  const auto session = Session::create(served.index, options);
  ASSERT_TRUE(session.ok()) << session.status().message();
  const auto& o = served.options;
  for (int64_t layer = 0; layer < o.layers; ++layer) {
    const RealLayer& real = context.layers[layer];
    const auto keys = testing::stored(DType::kBF16, real.keys);
    const auto values = testing::stored(DType::kBF16, real.values);
    const auto output = testing::attend(**session, layer, real.queries);
    ASSERT_TRUE(output.ok()) << output.status().message();
    for (int64_t row = 0; row < kQuestion * o.query_heads; ++row) {
      const int64_t head = row % o.query_heads / served.group();
      reference::Attention attention(&real.queries[row * o.head_dim], served.index->layers[layer],
                                     served.scale());
      for (int64_t t = 0; t < kTokens; ++t) {
        attention.add(keys.data(), values.data(), head * kTokens + t);
      }
      const reference::State expected = attention.state();
      ASSERT_NEAR(output->lse[row], expected.lse, 2e-5) << "layer " << layer << " row " << row;
      for (int64_t c = 0; c < o.head_dim; ++c) {
        ASSERT_NEAR(output->out[row * o.head_dim + c], expected.out[c],
                    2e-5 * (1 + std::abs(expected.out[c])))
            << "layer " << layer << " row " << row << " dim " << c;
      }
    }
  }
}

}  // namespace
}  // namespace sqz
