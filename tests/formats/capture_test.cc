#include "formats/capture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "formats/base/dtype.h"
#include "tests/common/capture_file.h"
#include "tests/common/json.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int64_t kTokens = 12, kQueries = 3;

ModelDescription model_of_100_words() {
  ModelDescription model = testing::tiny_model(2, 4, 2, 8);
  model.vocab_size = 100;
  return model;
}

CaptureInfo tiny_info() {
  CaptureInfo info;
  info.model = model_of_100_words();
  info.tokenizer_hash = "fedcba9876543210";
  for (int32_t i = 0; i < kTokens; ++i) info.tokens.push_back(i * 7 % 100);
  info.query_positions = {9, 10, 11};
  return info;
}

std::vector<float> ramp(int64_t count, float start) {
  std::vector<float> out(static_cast<size_t>(count));
  for (size_t i = 0; i < out.size(); ++i) out[i] = start + 0.125f * static_cast<float>(i);
  return out;
}

CapturedLayer tiny_layer(int64_t layer) {
  const ModelDescription model = model_of_100_words();
  const auto start = static_cast<float>(layer);
  CapturedLayer out;
  out.keys = ramp(model.kv_heads * kTokens * model.head_dim, start);
  out.values = ramp(model.kv_heads * kTokens * model.head_dim, start - 50);
  out.queries = ramp(model.query_heads * kQueries * model.head_dim, start + 50);
  return out;
}

class CaptureTest : public ::testing::Test {
 protected:
  void SetUp() override { H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }

  void write_tiny() { testing::write_capture(path_, tiny_info(), tiny_layer); }

  // Changes the file through HDF5 itself, as another program would.
  void change(const std::function<void(hid_t)>& edit) {
    const Hdf5Id file(H5Fopen(path_.c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    ASSERT_TRUE(file.ok());
    edit(file.get());
  }

  // Replaces a dataset. `properties`: of its creation.
  static Hdf5Id put(hid_t file, const char* name, hid_t type, const std::vector<int64_t>& dims,
                    const void* data, hid_t properties = H5P_DEFAULT) {
    H5Ldelete(file, name, H5P_DEFAULT);
    Hdf5Id dataset = testing::write_numbers(file, name, type, dims, data, properties);
    EXPECT_TRUE(dataset.ok()) << name;
    return dataset;
  }

  static void put_text(hid_t object, const char* name, const std::string& text) {
    if (H5Aexists(object, name) > 0) H5Adelete(object, name);
    const Hdf5Id type(H5Tcopy(H5T_C_S1)), space(H5Screate(H5S_SCALAR));
    H5Tset_size(type.get(), H5T_VARIABLE);  // as h5py writes text
    const Hdf5Id attribute(
        H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT));
    const char* pointer = text.c_str();
    H5Awrite(attribute.get(), type.get(), &pointer);
  }

  Status open() { return CaptureReader::open(path_).status(); }

  // A fresh file, changed by `edit`, is refused with the path and `field`.
  void expect_refused_after(const std::function<void(hid_t)>& edit, const std::string& field,
                            Code code = Code::kCorrupt) {
    write_tiny();
    change(edit);
    EXPECT_EQ(open().code(), code) << field << ": " << open().message();
    EXPECT_THAT(open().message(), ::testing::AllOf(HasSubstr(path_), HasSubstr(field)));
  }

  testing::TemporaryDirectory folder_;
  const std::string path_ = folder_.file("capture.h5");
};

TEST_F(CaptureTest, ReadsLayersOfEveryKind) {
  CaptureInfo info = tiny_info();
  info.model.sliding_window = {0, 4};
  LayerGeometry full = info.model.layer(0), state = full;
  full.value_dim = 3;
  state.kind = LayerKind::kState;
  info.model.layers = 3;
  info.model.geometry = {full, info.model.layer(1), state};
  info.model.sliding_window.push_back(0);
  info.state = {{}, {}, {{"conv", DType::kF32, {2, 3}}, {"steps", DType::kI64, {}}}};
  const auto layer_of = [](int64_t layer) {
    CapturedLayer out = tiny_layer(layer);
    if (layer == 0) out.values.resize(2 * kTokens * 3);
    if (layer == 1) {  // the last 3 tokens
      out.keys.resize(2 * 3 * 8);
      out.values.resize(2 * 3 * 8);
      out.queries.clear();
    }
    if (layer != 2) return out;
    out.state = {std::vector<std::byte>(24, std::byte{7}), std::vector<std::byte>(8, std::byte{9})};
    return out;
  };
  testing::write_capture(path_, info, layer_of);
  const auto reader = must(CaptureReader::open(path_));
  EXPECT_EQ(reader->info().model, info.model);
  EXPECT_EQ(reader->info().tokens, info.tokens);
  EXPECT_EQ(reader->info().tokenizer_hash, info.tokenizer_hash);
  EXPECT_EQ(reader->info().query_positions, info.query_positions);
  ASSERT_EQ(reader->info().state.size(), 3u);
  const std::vector<StateTensor>& found = reader->info().state[2];
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].name, "conv");
  EXPECT_EQ(found[1].dtype, DType::kI64);
  EXPECT_EQ(found[0].shape, (std::vector<int64_t>{2, 3}));
  for (const int64_t layer : {-1, 3}) {
    const Status status = reader->read_layer(layer).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("expected 0 to 2"));
  }
  for (int64_t layer = 0; layer < 3; ++layer) {
    const auto data = must(reader->read_layer(layer));
    const CapturedLayer expected = layer_of(layer);
    EXPECT_EQ(data.state, expected.state);
    if (layer < 2) {
      EXPECT_EQ(data.keys, expected.keys);
      EXPECT_EQ(data.values, expected.values);
      EXPECT_EQ(data.queries, expected.queries);
    }
  }
}

TEST_F(CaptureTest, ReadsHalfPrecision) {
  write_tiny();
  const CapturedLayer layer = tiny_layer(0);
  std::vector<uint16_t> half, brain;
  for (const float x : layer.keys) half.push_back(to_float16(x).bits);
  for (const float x : layer.values) brain.push_back(to_bfloat16(x).bits);
  change([&](hid_t file) {
    // The 16-bit float of IEEE 754, as numpy's float16 arrives through h5py.
    const Hdf5Id type(H5Tcopy(H5T_IEEE_F32LE));
    H5Tset_fields(type.get(), 15, 10, 5, 0, 10);
    H5Tset_size(type.get(), 2);
    H5Tset_ebias(type.get(), 15);
    put_text(put(file, "/layers/0/keys", type.get(), {2, kTokens, 8}, half.data()).get(), "rope",
             "post");
    put_text(put(file, "/layers/0/values", H5T_STD_U16LE, {2, kTokens, 8}, brain.data()).get(),
             "dtype", "bfloat16");
  });
  const auto reader = must(CaptureReader::open(path_));
  const CapturedLayer read = reader->read_layer(0).value();
  EXPECT_EQ(read.keys, layer.keys);  // multiples of 1/8 below 16: exact in binary16
  for (size_t i = 0; i < read.values.size(); ++i) {
    EXPECT_EQ(read.values[i], to_float(to_bfloat16(layer.values[i])));
  }
}

TEST_F(CaptureTest, ReadsCompressedAndWideIntegers) {
  write_tiny();
  const std::vector<float> zeros(2 * kTokens * 8, 0.0f);
  std::vector<int64_t> tokens(kTokens, 99);
  change([&](hid_t file) {
    const Hdf5Id properties(H5Pcreate(H5P_DATASET_CREATE));
    const hsize_t chunk[] = {1, kTokens, 8};
    H5Pset_chunk(properties.get(), 3, chunk);
    H5Pset_deflate(properties.get(), 6);
    put(file, "/layers/1/values", H5T_IEEE_F32LE, {2, kTokens, 8}, zeros.data(), properties.get());
    put(file, "/tokens", H5T_STD_I64LE, {kTokens}, tokens.data());
  });
  const auto reader = must(CaptureReader::open(path_));
  EXPECT_EQ(reader->read_layer(1).value().values, zeros);
  EXPECT_EQ(reader->info().tokens, std::vector<int32_t>(kTokens, 99));
}

TEST_F(CaptureTest, RefusesWhatIsNotHdf5) {
  EXPECT_EQ(open().code(), Code::kNotFound);
  for (const std::string& bytes : {std::string(), std::string(5000, 'x')}) {
    testing::write_file(path_, bytes);
    EXPECT_EQ(open().code(), Code::kCorrupt);
    EXPECT_THAT(open().message(), HasSubstr(path_ + ": not a readable HDF5 file"));
  }
}

// Cut anywhere, the file is refused; it never crashes and never reads as whole.
TEST_F(CaptureTest, RefusesEveryTruncation) {
  write_tiny();
  const auto size = fs::file_size(path_);
  for (uintmax_t keep = 0; keep < size; keep += 97) {
    write_tiny();
    fs::resize_file(path_, keep);
    EXPECT_FALSE(open().ok()) << "cut at " << keep << " of " << size;
  }
}

TEST_F(CaptureTest, RefusesMissingPartsAndABadModelDescription) {
  for (const char* name : {"/tokens", "/query_positions", "/layers/0/keys", "/layers/1/queries"}) {
    expect_refused_after([&](hid_t file) { H5Ldelete(file, name, H5P_DEFAULT); }, name);
  }
  expect_refused_after([](hid_t file) { H5Adelete(file, "model"); }, "attribute model");
  const auto model = [](const Json& patch) {
    Json json = json_of(to_json(model_of_100_words()));
    json.update(patch);
    return [text = json.dump()](hid_t file) { put_text(file, "model", text); };
  };
  expect_refused_after([](hid_t file) { put_text(file, "model", "{ no"); }, "attribute model");
  expect_refused_after(model({{"layers", 3}, {"sliding_window", {0, 0, 0}}}), "/layers/2/keys");
  expect_refused_after(model({{"kv_heads", 0}}), "kv_heads");
  expect_refused_after([](hid_t file) { put_text(file, "tokenizer_hash", "FEDCBA9876543210"); },
                       "attribute tokenizer_hash");
  expect_refused_after(
      [](hid_t file) { put(file, "/layers/0/state/a-b", H5T_STD_U8LE, {0}, nullptr); },
      "/layers/0/state/a-b");
  const auto number = [](hid_t file) {
    H5Adelete(file, "model");
    const Hdf5Id space(H5Screate(H5S_SCALAR));
    Hdf5Id(H5Acreate2(file, "model", H5T_NATIVE_INT, space.get(), H5P_DEFAULT, H5P_DEFAULT));
  };
  expect_refused_after(number, "attribute model");
}

TEST_F(CaptureTest, RefusesWrongShapesTypesAndNumbers) {
  const std::vector<double> zeros(4096);
  struct Wrong {
    const char* dataset;
    hid_t type;
    std::vector<int64_t> dims;
    std::vector<int64_t> numbers;  // zeros if empty
  };
  const hid_t f32 = H5T_IEEE_F32LE, i64 = H5T_STD_I64LE;
  for (const Wrong& wrong : {Wrong{"/layers/0/keys", f32, {kTokens, 8}, {}},
                             {"/layers/0/keys", f32, {2, kTokens - 1, 8}, {}},
                             {"/layers/1/values", f32, {2, kTokens, 16}, {}},
                             {"/layers/1/queries", f32, {4, kQueries + 1, 8}, {}},
                             {"/tokens", i64, {3, 4}, {}},
                             {"/layers/0/values", H5T_IEEE_F64LE, {2, kTokens, 8}, {}},
                             {"/layers/0/values", H5T_IEEE_F32BE, {2, kTokens, 8}, {}},
                             {"/layers/0/values", H5T_STD_U16LE, {2, kTokens, 8}, {}},
                             {"/tokens", H5T_IEEE_F64LE, {kTokens}, {}},
                             {"/tokens", i64, {2}, {0, 100}},
                             {"/tokens", i64, {2}, {0, -1}},
                             {"/query_positions", i64, {3}, {9, 11, 10}},
                             {"/query_positions", i64, {3}, {9, 9, 10}},
                             {"/query_positions", i64, {3}, {9, 10, kTokens}}}) {
    const auto edit = [&](hid_t file) {
      const void* data =
          wrong.numbers.empty() ? static_cast<const void*>(zeros.data()) : wrong.numbers.data();
      put_text(put(file, wrong.dataset, wrong.type, wrong.dims, data).get(), "rope", "post");
    };
    expect_refused_after(edit, wrong.dataset);
  }
}

TEST_F(CaptureTest, WithoutAVocabularyOrTokenizer) {
  CaptureInfo info = tiny_info();
  info.model.vocab_size = 0;
  info.tokens[1] = INT32_MAX;
  info.tokenizer_hash.clear();
  testing::write_capture(path_, info, tiny_layer);
  const CaptureInfo found = CaptureReader::open(path_).value()->info();
  EXPECT_EQ(found.tokens, info.tokens);
  EXPECT_EQ(found.tokenizer_hash, "");
  std::vector<int64_t> ids(info.tokens.begin(), info.tokens.end());
  ids[1] = int64_t{1} << 31;
  change([&](hid_t file) { put(file, "/tokens", H5T_STD_I64LE, {kTokens}, ids.data()); });
  EXPECT_THAT(open().message(), HasSubstr("/tokens: found id 2147483648 at index 1"));
}

TEST_F(CaptureTest, RefusesBadRope) {
  for (const auto& [name, rope] : {std::pair("/layers/0/keys", "rotated"),
                                   {"/layers/1/keys", "pre"},
                                   {"/layers/0/keys", ""}}) {
    const auto set = [&, name = name, rope = std::string(rope)](hid_t file) {
      const Hdf5Id keys(H5Dopen2(file, name, H5P_DEFAULT));
      rope.empty() ? void(H5Adelete(keys.get(), "rope")) : put_text(keys.get(), "rope", rope);
    };
    expect_refused_after(set, name);
  }
}

// A shape is a claim: without the bytes behind it nothing is allocated.
TEST_F(CaptureTest, RefusesShapesWithoutData) {
  const int64_t huge = int64_t{1} << 40;
  const hsize_t gib = hsize_t{1} << 28;  // rows of 4 bytes
  for (const auto& [rows, deflate, code] : {std::tuple(hsize_t{1024}, false, Code::kCorrupt),
                                            {hsize_t{1024}, true, Code::kCorrupt},
                                            {gib, false, Code::kCorrupt},
                                            {gib + 1, false, Code::kUnsupported},
                                            {hsize_t{0}, false, Code::kCorrupt}}) {
    const auto edit = [&, rows = rows, deflate = deflate](hid_t file) {
      const Hdf5Id properties(H5Pcreate(H5P_DATASET_CREATE));
      if (rows > 0) H5Pset_chunk(properties.get(), 1, &rows);
      if (deflate) H5Pset_deflate(properties.get(), 1);
      put(file, "/tokens", H5T_STD_I32LE, {huge}, nullptr, properties.get());
    };
    expect_refused_after(edit, "/tokens", code);
  }
}

// HDF5 would read zeros.
TEST_F(CaptureTest, RefusesChunksThatNobodyWrote) {
  const std::vector<float> keys = ramp(2 * kTokens * 8, 1);
  const auto edit = [&](const float* data) {
    return [data](hid_t file) {
      const Hdf5Id properties(H5Pcreate(H5P_DATASET_CREATE));
      const hsize_t chunk[] = {1, 5, 8};
      H5Pset_chunk(properties.get(), 3, chunk);
      H5Pset_deflate(properties.get(), 6);
      const Hdf5Id set =
          put(file, "/layers/0/keys", H5T_IEEE_F32LE, {2, kTokens, 8}, data, properties.get());
      put_text(set.get(), "rope", "post");
    };
  };
  write_tiny();
  change(edit(keys.data()));
  EXPECT_EQ(must(must(CaptureReader::open(path_))->read_layer(0)).keys, keys);
  expect_refused_after(edit(nullptr), "0 chunks");
}

TEST_F(CaptureTest, NeverLeavesTheFile) {
  write_tiny();
  const std::string other = folder_.file("other.h5");
  fs::copy_file(path_, other);
  expect_refused_after(
      [&](hid_t file) {
        H5Ldelete(file, "/tokens", H5P_DEFAULT);
        H5Lcreate_external(other.c_str(), "/tokens", file, "/tokens", H5P_DEFAULT, H5P_DEFAULT);
      },
      "/tokens");
  testing::write_file(folder_.file("raw"), std::string(kTokens * 4, '\0'));
  expect_refused_after(
      [&](hid_t file) {
        const Hdf5Id properties(H5Pcreate(H5P_DATASET_CREATE));
        H5Pset_external(properties.get(), folder_.file("raw").c_str(), 0, kTokens * 4);
        put(file, "/tokens", H5T_STD_I32LE, {kTokens}, nullptr, properties.get());
      },
      "/tokens", Code::kUnsupported);
}

}  // namespace
}  // namespace sqz
