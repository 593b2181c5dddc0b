// The whole path on a trained model's keys and queries: a dense pass over a book, an index of it,
// and sessions whose selections and states equal the float64 reference's.
#include "formats/tokenizer.h"
#include "libindex/builder.h"
#include "tests/libruntime/served_index.h"
#include "tests/training/golden.h"

namespace sqz {
namespace {

constexpr int64_t kTokens = 1500;    // of the fixed context
constexpr int64_t kQuestion = 24;    // tokens after it, whose queries are asked
constexpr double kCloseCall = 2e-5;  // in log S: float32 may decide otherwise than float64

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
  const auto logits = (*runner)->prefill(ids, pass);
  ASSERT_TRUE(logits.ok()) << logits.status().message();
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

class RealKeys : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    context_ = new RealContext;
    make_context(*context_);
  }
  static void TearDownTestSuite() { delete context_; }

  static const testing::Served& served() { return context_->served; }
  static std::unique_ptr<Session> open(const SelectionRequest& selection) {
    SessionOptions options;
    options.selection = selection;
    options.max_tokens = kQuestion;
    options.threads = 2;
    auto session = Session::create(served().index, options);
    EXPECT_TRUE(session.ok()) << session.status().message();
    return *std::move(session);
  }
  // The first `tokens` questions' queries of a layer: [tokens, Hq, d].
  static std::vector<float> questions(int64_t layer, int64_t tokens) {
    std::vector<float> out = context_->layers[layer].queries;
    out.resize(out.size() / kQuestion * tokens);
    return out;
  }

  static inline RealContext* context_ = nullptr;
};

// The file's permuted keys against the dense pass's, in token order.
TEST_F(RealKeys, DenseStatesAreThoseOfTheModelsOwnKeys) {
  const auto session = open({.selector = SelectorKind::kDense});
  const auto& o = served().options;
  for (int64_t layer = 0; layer < o.layers; ++layer) {
    const RealLayer& real = context_->layers[layer];
    const auto keys = testing::stored(DType::kBF16, real.keys);
    const auto values = testing::stored(DType::kBF16, real.values);
    const auto queries = questions(layer, kQuestion);
    const auto output = testing::attend(*session, layer, queries);
    ASSERT_TRUE(output.ok()) << output.status().message();
    for (int64_t row = 0; row < kQuestion * o.query_heads; ++row) {
      const int64_t head = row % o.query_heads / served().group();
      reference::Attention attention(&queries[row * o.head_dim], served().index->layers[layer],
                                     served().scale());
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

// Keys that one selection reads, over all KV heads, and those that there are.
struct Fill {
  int64_t keys = 0, possible = 0;
};

// One selection for all `tokens`: the chosen slots and the state of every row. False if a decision
// was too close to call.
bool check_layer(const testing::Served& served, Session& session, int64_t layer,
                 const std::vector<float>& queries, const SelectionRequest& request, Fill& fill) {
  const auto& o = served.options;
  const LayerView& view = served.index->layers[layer];
  const int64_t tokens = std::ssize(queries) / (o.query_heads * o.head_dim);
  const int scope = tokens == 1 ? 0 : 1;
  const auto output = testing::attend(session, layer, queries);
  EXPECT_TRUE(output.ok()) << output.status().message();
  const auto chosen = session.select(testing::make_call(layer, tokens, queries.data(), {}));
  EXPECT_TRUE(chosen.ok()) << chosen.status().message();
  for (int64_t head = 0; head < o.kv_heads; ++head) {
    reference::SelectParameters p;
    p.levels = session.plan().levels;
    p.budget_rule = request.rule == RuleKind::kBudget;
    const auto& thresholds = session.plan().log_thresholds[scope];
    p.log_thresholds.assign(thresholds.begin(), thresholds.end());
    if (p.budget_rule) p.share = session.plan().head_keep[scope][layer * o.kv_heads + head];
    const auto selected =
        reference::select(view, head, testing::group_of(served, queries, 0, tokens, head), tokens,
                          served.group(), served.scale(), p);
    if (selected.margin < kCloseCall) return false;
    std::vector<bool> slots(view.slots, false);
    const HeadSelection& head_chosen = (*chosen)[head];
    for (const KeyRun& run : head_chosen.read.runs()) {
      std::fill_n(slots.begin() + run.first, run.length, true);
    }
    EXPECT_EQ(slots, selected.slots) << "KV head " << head;
    fill.keys += std::count(slots.begin(), slots.end(), true);
    fill.possible += view.slots;
    for (int64_t i = 0; i < tokens * served.group(); ++i) {
      const int64_t row =
          i / served.group() * o.query_heads + head * served.group() + i % served.group();
      const auto expected = reference::attend(&queries[row * o.head_dim], view, head,
                                              served.scale(), selected, false);
      EXPECT_NEAR(output->lse[row], expected.lse, 2e-5) << "row " << row;
      for (int64_t c = 0; c < o.head_dim; ++c) {
        EXPECT_NEAR(output->out[row * o.head_dim + c], expected.out[c],
                    2e-5 * (1 + std::abs(expected.out[c])))
            << "row " << row << " dim " << c;
      }
      if (::testing::Test::HasFailure()) return true;
    }
  }
  return true;
}

TEST_F(RealKeys, SelectionsAndStatesEqualTheReference) {
  int clear = 0, total = 0;
  Fill fill;
  for (const int levels : {1, 2}) {
    for (const RuleKind rule : {RuleKind::kThreshold, RuleKind::kBudget}) {
      const SelectionRequest request{.rule = rule, .levels = levels, .keep = 0.1};
      const auto session = open(request);
      for (int64_t layer = 0; layer < served().options.layers; ++layer) {
        for (const int64_t tokens : {int64_t{1}, kQuestion}) {
          SCOPED_TRACE(concat("levels ", levels, " rule ", static_cast<int>(rule), " layer ", layer,
                              " tokens ", tokens));
          clear += check_layer(served(), *session, layer, questions(layer, tokens), request, fill);
          ++total;
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(clear, total * 9 / 10);
  // A tenth was asked for; selecting nearly nothing or everything would test little.
  EXPECT_GT(fill.keys, fill.possible / 20);
  EXPECT_LT(fill.keys, fill.possible / 3);
}

}  // namespace
}  // namespace sqz
