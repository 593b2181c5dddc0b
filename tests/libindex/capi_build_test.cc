// sqz_build.h as a host meets it, through libsqz.so, against the functions behind it: libsqz has a
// trainer of its own in place of FAISS, so equal bytes are not self-evident.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/json_fields.h"
#include "libindex/builder.h"
#include "libindex/recalibrate.h"
#include "sqz/sqz_build.h"
#include "tests/common/layered_index.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libindex/clustered_data.h"

extern "C" int sqz_build_header_is_c99(void);

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kTokens = 600, kDim = 16, kHeads = 2, kQueryHeads = 4, kLayers = 3, kTail = 20;
constexpr const char* kOptions =
    R"({"sink": 4, "tail": 20, "tokenizer_hash": "00000000000000ab", "threads": 2})";

// A tensor of numbers in one of the dtypes, on the CPU.
struct Tensor {
  explicit Tensor(const std::vector<float>& numbers, std::vector<int64_t> dims, int code = 2,
                  int bits = 32)
      : shape(std::move(dims)), floats(numbers) {
    for (const float x : numbers) halves.push_back(to_float16(x).bits);
    view.data = bits == 32 ? static_cast<void*>(floats.data()) : halves.data();
    view.device_type = 1;
    view.ndim = static_cast<int32_t>(shape.size());
    view.dtype_code = static_cast<uint8_t>(code);
    view.dtype_bits = static_cast<uint8_t>(bits);
    view.dtype_lanes = 1;
    view.shape = shape.data();
  }
  std::vector<int64_t> shape;
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  sqz_tensor view = {};
};

// Numbers that float16 holds, so that both dtypes of a tensor are the same layer.
std::vector<float> numbers(int64_t rows, int64_t seed) {
  std::vector<float> out =
      test::clustered_points(rows, kDim, 30, 0.5f, static_cast<uint64_t>(seed));
  for (float& x : out) x = to_float(to_float16(x));
  return out;
}
struct Layer {
  explicit Layer(int64_t l)
      : keys(numbers(kHeads * kTokens, 3 * l)),
        values(numbers(kHeads * kTokens, 3 * l + 1)),
        queries(numbers(kQueryHeads * kTail, 3 * l + 2)) {}
  std::vector<float> keys, values, queries;
};

class CApiBuild : public ::testing::Test {
 protected:
  CApiBuild() {
    model_.sliding_window = {0, 64, 0};
    for (int32_t i = 0; i < kTokens; ++i) tokens_.push_back(i * 7 % 1000);
  }
  ~CApiBuild() override { sqz_build_destroy(build_); }

  sqz_status create(const char* options) {
    sqz_build_destroy(build_);
    return sqz_build_create(path_.c_str(), to_json(model_).str().c_str(), tokens_.data(),
                            std::ssize(tokens_), options, &build_);
  }
  sqz_status add(int64_t l, int bits = 32, const sqz_progress* progress = nullptr) {
    const Layer layer(l);
    const Tensor keys(layer.keys, {kHeads, kTokens, kDim}, 2, bits);
    const Tensor values(layer.values, {kHeads, kTokens, kDim}, 2, bits);
    const Tensor queries(layer.queries, {kQueryHeads, kTail, kDim}, 2, bits);
    return sqz_build_add_layer(build_, &keys.view, &values.view, l == 1 ? nullptr : &queries.view,
                               progress);
  }
  void build(const char* options, int bits = 32) {
    ASSERT_EQ(create(options), SQZ_OK) << sqz_last_error();
    for (int64_t l = 0; l < kLayers; ++l) ASSERT_EQ(add(l, bits), SQZ_OK) << sqz_last_error();
    ASSERT_EQ(sqz_build_finish(build_), SQZ_OK) << sqz_last_error();
  }
  std::string built_by_libindex(BuildOptions options) {
    options.sink = 4;
    options.tail = kTail;
    options.engine = "faiss";
    const std::string path = directory_.file("other.sqz");
    const auto builder = IndexBuilder::create(Env::posix(), path, true, model_, tokens_,
                                              "00000000000000ab", options);
    EXPECT_TRUE(builder.ok()) << builder.status().message();
    for (int64_t l = 0; l < kLayers; ++l) {
      const Layer layer(l);
      EXPECT_TRUE((*builder)->add_layer(l, {layer.keys, layer.values, layer.queries}).ok());
    }
    EXPECT_TRUE((*builder)->finish().ok());
    return testing::read_file(path);
  }
  sqz_index* open() {
    sqz_index* index = nullptr;
    EXPECT_EQ(sqz_index_open(path_.c_str(), SQZ_OPEN_MMAP, &index), SQZ_OK) << sqz_last_error();
    return index;
  }
  void expect_refused(sqz_status found, sqz_status expected, const char* sentence) {
    EXPECT_EQ(found, expected);
    EXPECT_THAT(sqz_last_error(), HasSubstr(sentence));
  }

  testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.file("a.sqz");
  ModelDescription model_ = testing::tiny_model(kLayers, kQueryHeads, kHeads, kDim);
  std::vector<int32_t> tokens_;
  sqz_build* build_ = nullptr;
};

TEST_F(CApiBuild, HeaderIsC99) {
  EXPECT_EQ(sqz_build_header_is_c99(), 1);
}

TEST_F(CApiBuild, HasTheBytesOfLibindex) {
  build(kOptions);
  const std::string result = sqz_last_result();
  EXPECT_THAT(result, HasSubstr(R"("tokens":600)"));
  const std::string expected = built_by_libindex({});
  EXPECT_EQ(testing::read_file(path_), expected);
  EXPECT_THAT(result, HasSubstr(concat("\"bytes\":", expected.size())));

  build(R"({"sink": 4, "tail": 20, "tokenizer_hash": "00000000000000ab", "replace": true})", 16);
  EXPECT_EQ(testing::read_file(path_), expected) << "from float16";

  build(
      R"({"sink": 4, "tail": 20, "tokenizer_hash": "00000000000000ab", "replace": true, "rows": "f16", "levels": 1,
            "seed": 5, "iterations": 3})");
  BuildOptions other;
  other.dtype = DType::kF16;
  other.level_fractions = {0.05};
  other.seed = 5;
  other.iterations = 3;
  EXPECT_EQ(testing::read_file(path_), built_by_libindex(other));
}

TEST_F(CApiBuild, NothingIsThereBeforeTheEnd) {
  ASSERT_EQ(create(kOptions), SQZ_OK) << sqz_last_error();
  ASSERT_EQ(add(0), SQZ_OK);
  expect_refused(sqz_build_finish(build_), SQZ_INVALID_ARGUMENT,
                 "layers added: found 1, expected 3");
  EXPECT_EQ(add(1), SQZ_INVALID_ARGUMENT) << "after an error";
  sqz_build_destroy(build_);
  build_ = nullptr;
  EXPECT_THAT(directory_.names(), IsEmpty());

  ASSERT_EQ(create(R"({"dry_run": true})"), SQZ_OK);
  EXPECT_THAT(sqz_last_result(), HasSubstr("\"peak_memory\":"));
  EXPECT_NE(add(0), SQZ_OK);
  build(kOptions);
  expect_refused(create(kOptions), SQZ_EXISTS, path_.c_str());
}

TEST_F(CApiBuild, BadInput) {
  expect_refused(create("{"), SQZ_INVALID_ARGUMENT, "options: ");
  expect_refused(create(R"({"sinks": 1})"), SQZ_INVALID_ARGUMENT,
                 "found \"sinks\", expected some of");
  expect_refused(create(R"({"rows": "q4"})"), SQZ_INVALID_ARGUMENT, "expected bf16, f16, q8");
  expect_refused(create(R"({"tail": 0})"), SQZ_INVALID_ARGUMENT, "tail");
  expect_refused(create(R"({"page_size": 8})"), SQZ_INVALID_ARGUMENT, "expected partition pages");
  expect_refused(create(R"({"partition": "pages", "levels": 2})"), SQZ_INVALID_ARGUMENT, "levels");
  expect_refused(create(R"({"tail": 590})"), SQZ_INVALID_ARGUMENT, "608");
  tokens_[5] = 1000;
  expect_refused(create(kOptions), SQZ_INVALID_ARGUMENT,
                 "tokens[5]: found 1000, expected 0 to 999");
  tokens_[5] = 5;
  model_.head_dim = 0;
  expect_refused(create(kOptions), SQZ_INVALID_ARGUMENT, "model: head_dim: found 0");
  EXPECT_EQ(build_, nullptr);
  EXPECT_EQ(sqz_build_add_layer(nullptr, nullptr, nullptr, nullptr, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_build_finish(nullptr), SQZ_INVALID_ARGUMENT);

  model_.head_dim = kDim;
  ASSERT_EQ(create(kOptions), SQZ_OK) << sqz_last_error();
  const Layer layer(0);
  const Tensor good(layer.keys, {kHeads, kTokens, kDim}),
      few(layer.queries, {kQueryHeads, 10, kDim});
  Tensor gpu(layer.keys, {kHeads, kTokens, kDim}), wide(layer.keys, {kTokens, kHeads, kDim});
  gpu.view.device_type = 2;
  const auto refused = [&](const Tensor& keys, const sqz_tensor* queries, const char* sentence) {
    expect_refused(sqz_build_add_layer(build_, &keys.view, &good.view, queries, nullptr),
                   SQZ_INVALID_ARGUMENT, sentence);
  };
  refused(wide, nullptr, "keys: shape: found [600, 2, 16], expected [2, 600, 16]");
  refused(gpu, nullptr, "keys: found on CUDA, expected on the CPU");
  refused(good, &few.view, "queries: shape: found [4, 10, 16], expected [4, 20, 16]");
  refused(good, nullptr, "elements of queries");
}

TEST_F(CApiBuild, LayersOfEveryKind) {
  model_ = testing::layered_model();
  tokens_.assign(testing::kLayeredTokens, 3);
  const auto state = testing::layered_state();
  constexpr const char* kState =
      R"({"sink": 2, "tail": 5, "level_fractions": [0.1, 0.3], "iterations": 2, "state": [
      {"ssm": ["BF16", [1, 3]]}, null, {"conv": ["F32", [2, 3]], "steps": ["I64", [2]]}, null,
      null, null]})";
  for (const char* wrong : {"3", R"([{"a": ["F32", [-1]]}, null, null, null, null, null])",
                            R"([{"a": ["F33", [1]]}, null, null, null, null, null])",
                            R"([{"a/b": ["F32", [1]]}, null, null, null, null, null])",
                            R"([null, null, null, {"a": ["F32", [1]]}, null, null])", "[null]",
                            R"(["a", null, null, null, null, null])"}) {
    const std::string options = concat(R"({"sink": 2, "tail": 5, "state": )", wrong, "}");
    expect_refused(create(options.c_str()), SQZ_INVALID_ARGUMENT, "state");
  }
  ASSERT_EQ(create(kState), SQZ_OK) << sqz_last_error();
  const auto add_state = [&](int64_t layer, const StateTensor& one) {
    std::vector<int64_t> shape = one.shape;
    sqz_tensor view = {};
    view.data = const_cast<void*>(one.data);
    view.device_type = view.dtype_lanes = 1;
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    view.dtype_code = one.dtype == DType::kF32 ? 2 : one.dtype == DType::kBF16 ? 4 : 0;
    view.dtype_bits = static_cast<uint8_t>(8 * dtype_size(one.dtype));
    return sqz_build_add_state(build_, layer, one.name.c_str(), &view);
  };
  EXPECT_EQ(add_state(2, state[2][0]), SQZ_OK) << sqz_last_error();
  for (int64_t l = 0; l < model_.layers; ++l) {
    const LayerGeometry own = model_.layer(l);
    if (!own.has_keys()) continue;
    const int64_t given = testing::kLayeredTokens - own.first_seen(testing::kLayeredTokens);
    const auto rows = testing::layered_rows(own, l, given, 5);
    const Tensor keys(rows.keys, {own.kv_heads, given, own.head_dim});
    const Tensor values(rows.values, {own.kv_heads, given, own.value_dim});
    const Tensor queries(rows.queries, {own.query_heads, 5, own.head_dim});
    ASSERT_EQ(sqz_build_add_layer(build_, &keys.view, &values.view,
                                  own.kind == LayerKind::kFull ? &queries.view : nullptr, nullptr),
              SQZ_OK)
        << sqz_last_error();
  }
  EXPECT_EQ(add_state(0, state[0][0]), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(add_state(2, state[2][1]), SQZ_OK) << sqz_last_error();
  ASSERT_EQ(sqz_build_finish(build_), SQZ_OK) << sqz_last_error();

  const std::string other = directory_.file("other.sqz");
  ASSERT_EQ(testing::write_layered_index(other).message(), "");
  EXPECT_EQ(testing::read_file(path_), testing::read_file(other));
  ASSERT_EQ(create(R"({"sink": 2, "tail": 5, "replace": true, "state":
      [{"ssm": ["BF16", [1, 3]]}, null, null, null, null, null]})"),
            SQZ_OK);
  EXPECT_EQ(add_state(2, state[2][0]), SQZ_INVALID_ARGUMENT) << "not declared";
  EXPECT_THAT(sqz_last_error(),
              HasSubstr("layers.2.state.steps: found I64[2], expected no such tensor"));
  ASSERT_EQ(create(R"({"sink": 2, "tail": 5, "replace": true, "state":
      [{"ssm": ["BF16", [1, 3]]}, null, null, null, null, null]})"),
            SQZ_OK);
  EXPECT_EQ(add_state(0, state[0][0]), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(add_state(0, state[0][0]), SQZ_INVALID_ARGUMENT) << sqz_last_error();
}

TEST_F(CApiBuild, TellsHowFarItIs) {
  std::vector<double> told;
  const sqz_progress progress = {
      [](void* user, double done) { static_cast<std::vector<double>*>(user)->push_back(done); },
      &told};
  ASSERT_EQ(create(kOptions), SQZ_OK);
  ASSERT_EQ(add(0, 32, &progress), SQZ_OK);
  EXPECT_THAT(told, ::testing::ElementsAre(0.5, 1));
}

TEST_F(CApiBuild, CalibratesCompressesAndDescribes) {
  build(R"({"sink": 4, "tail": 20, "rows": "bf16"})");
  sqz_index* index = open();
  ASSERT_NE(index, nullptr);
  ASSERT_EQ(sqz_index_info_json(index), SQZ_OK);
  const auto info = parse_json_object(sqz_last_result(), "info");
  EXPECT_EQ(info->root().find("tail")->integer(0, 100), kTail);

  const auto file = SqzFile::open(path_);
  RecordedQueries recorded{
      {3, 1}, {numbers(4 * kQueryHeads, 50), {}, numbers(4 * kQueryHeads, 51)}, "two"};
  const std::string expected = directory_.file("expected.sqz"),
                    found = directory_.file("found.sqz");
  ASSERT_TRUE(recalibrate(Env::posix(), **file, recorded, expected, {}).ok());
  const Tensor first(recorded.layers[0], {4, kQueryHeads, kDim}, 2, 16);
  const Tensor last(recorded.layers[2], {4, kQueryHeads, kDim});
  const sqz_tensor* queries[] = {&first.view, nullptr, &last.view};
  ASSERT_EQ(sqz_index_calibrate(index, recorded.calls.data(), 2, queries, found.c_str(),
                                R"({"source": "two"})", nullptr),
            SQZ_OK)
      << sqz_last_error();
  EXPECT_EQ(testing::read_file(found), testing::read_file(expected));
  EXPECT_NE(testing::read_file(found), testing::read_file(path_));
  expect_refused(sqz_index_calibrate(index, recorded.calls.data(), 1, queries, found.c_str(),
                                     nullptr, nullptr),
                 SQZ_INVALID_ARGUMENT, "queries[0]: shape: found [4, 4, 16], expected [3, 4, 16]");

  ASSERT_TRUE(compress_index(Env::posix(), **file, {.rows = RowKind::kQ8}, expected, true, 1).ok());
  ASSERT_EQ(sqz_index_compress(index, found.c_str(), R"({"rows": "q8", "replace": true})", nullptr),
            SQZ_OK)
      << sqz_last_error();
  EXPECT_EQ(testing::read_file(found), testing::read_file(expected));
  expect_refused(sqz_index_compress(index, found.c_str(), R"({"rows": "q4"})", nullptr),
                 SQZ_INVALID_ARGUMENT, "rows: found \"q4\"");

  sqz_index_close(index);
}

}  // namespace
}  // namespace sqz
