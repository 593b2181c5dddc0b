// Every way of being malformed that we could think of is refused when the file is opened, with the
// right words. The header's hash is right in all of them (but where it is the point): they are what
// a wrong writer, or a clever one, would make.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "formats/sqz_file.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::RawIndex;

struct Malformed {
  const char* name;
  std::function<std::string(RawIndex&)> make;  // the file's bytes, from a good index
  std::vector<std::string> says;
  Code code = Code::kCorrupt;
};

Malformed edit(const char* name, std::function<void(RawIndex&)> change,
               std::vector<std::string> says, Code code = Code::kCorrupt) {
  return {name,
          [change = std::move(change)](RawIndex& index) {
            change(index);
            return index.bytes();
          },
          std::move(says), code};
}

Malformed meta(const char* name, const char* key, const char* value, std::vector<std::string> says,
               Code code = Code::kCorrupt) {
  return edit(
      name, [=](RawIndex& index) { index.metadata[key] = value; }, std::move(says), code);
}

Malformed without(const char* name, const char* key) {
  return edit(name, [=](RawIndex& index) { index.metadata.erase(key); },
              {"__metadata__", concat(key, ": found nothing")});
}

Malformed model(const char* name, const char* pointer, const nlohmann::json& value,
                std::vector<std::string> says) {
  return edit(
      name, [=](RawIndex& index) { index.set_json("model", pointer, value); }, std::move(says));
}

Malformed text(const char* name, const std::string& bytes, std::vector<std::string> says) {
  return {name, [=](RawIndex&) { return bytes; }, std::move(says)};
}

std::vector<Malformed> foreign_files() {
  return {
      text("Empty", "", {"the file is empty"}),
      text("ThreeBytes", "abc", {"not an index", "\"abc\""}),
      text("Html", "<!DOCTYPE html><html></html>", {"not an index", "\"<!DOCTYPE html><\""}),
      text("Json", "{\"a\": [1, 2, 3]}", {"not an index", "safetensors"}),
      text("Hdf5", std::string("\x89HDF\r\n\x1a\n\0\0\0\0\0\0", 14), {"header length"}),
      text("Zeros", std::string(100, '\0'), {"header", "found nothing"}),
      text("PlainSafetensors", testing::safetensors_bytes("{}", ""),
           {"a safetensors file but not an index", "format: found nothing"}),
      text("TorchSafetensors",
           testing::safetensors_bytes(R"({"__metadata__":{"format":"pt"}})", ""),
           {"a safetensors file but not an index", "found \"pt\", expected \"sqz\""}),
      {"CutByOne",
       [](RawIndex& index) {
         std::string bytes = index.bytes();
         bytes.pop_back();
         return bytes;
       },
       {"file length"}},
      edit("BytesAfterTheEnd", [](RawIndex& index) { index.tail += 'x'; }, {"file length"}),
  };
}

std::vector<Malformed> bad_metadata() {
  return {
      edit("FormatMissing", [](RawIndex& index) { index.metadata.erase("format"); },
           {"not an index"}),
      meta("NewerVersion", "format_version", "4",
           {"format_version: found 4", "sqz 0.2.0", "expected at most 3", "newer sqz"},
           Code::kUnsupported),
      meta("VersionZero", "format_version", "0", {"format_version: found 0"}),
      meta("VersionIsText", "format_version", "one", {"format_version", "not valid JSON"}),
      meta("VersionIsHuge", "format_version", "18446744073709551616",
           {"format_version", "64 bits"}),
      without("NoVersion", "format_version"),
      meta("OtherKind", "kind", "qmodel", {"kind: found \"qmodel\", expected \"index\""},
           Code::kUnsupported),
      without("NoKind", "kind"),
      without("NoProducer", "producer"),
      without("NoModel", "model"),
      without("NoTokenizerHash", "tokenizer_hash"),
      without("NoTokensHash", "tokens_hash"),
      without("NoTokens", "tokens"),
      without("NoSink", "sink"),
      without("NoTail", "tail"),
      without("NoPartition", "partition"),
      without("NoLevels", "levels"),
      without("NoDType", "dtype"),
      without("NoValueMeans", "value_means"),
      without("NoBuild", "build"),
      without("NoLayers", "layers"),
      without("NoCalibration", "calibration"),
      without("NoChecksums", "checksums"),
      meta("TokensNegative", "tokens", "-1", {"tokens: found -1"}),
      meta("TokensBeyondU32", "tokens", "4294967296", {"tokens: found 4294967296"}),
      meta("TokensFractional", "tokens", "64.0", {"tokens: found 64.0", "an integer"}),
      meta("TokensQuoted", "tokens", "\"64\"", {"tokens: found \"64\""}),
      meta("TokensAnother", "tokens", "65", {"layers.0.positions", "U32[2, 56]", "U32[2, 57]"}),
      meta("SinkBeyondTokens", "sink", "65", {"sink: found 65"}),
      meta("TailBeyondTokens", "tail", "63", {"tail: found 63", "[0, 62]"}),
      meta("NothingToCluster", "tail", "62", {"more than sink and tail"}),
      meta("FiveLevels", "levels", "5", {"levels: found 5"}),
      meta("NoLevelButSparseLayers", "levels", "0", {"levels: found 0", "not every layer"}),
      meta("ThreeLevels", "levels", "3", {"layers.0.level.3.centroids", "nothing"}),
      meta("OneLevel", "levels", "1", {"layers.0.level.2.centroids"}),
      meta("UnknownDType", "dtype", "FP4", {"dtype: found \"FP4\""}),
      meta("WideDType", "dtype", "F32", {"dtype: found F32, expected BF16 or F16"}),
      meta("OtherDType", "dtype", "F16", {"layers.0.level.1.centroids", "found BF16", "F16"}),
      meta("OtherPartition", "partition", "pages", {"page_size: found nothing"}),
      meta("UnknownPartition", "partition", "tiles", {"partition: found \"tiles\""}),
      meta("KvNotBoolean", "kv", "yes", {"kv: found \"yes\", expected true or false"}),
      meta("KvDenied", "kv", "false", {"kv: found false", "build the index again"}),
      meta("ValueMeansDenied", "value_means", "false", {"layers.0.level.1.value_means"}),
      meta("TokensHashShort", "tokens_hash", "ab", {"tokens_hash: found \"ab\""}),
      meta("TokensHashUpperCase", "tokens_hash", "00000000000000BB", {"16 hexadecimal"}),
      meta("TokenizerHashBad", "tokenizer_hash", "x", {"tokenizer_hash: found \"x\""}),
      meta("BuildNotJson", "build", "{", {"build: not valid JSON"}),
      meta("LayersNotArray", "layers", "{}", {"layers: found an object", "an array"}),
      meta("LayersTooFew", "layers", R"([{"dense":false,"window":0}])",
           {"layers: found 1 entries, expected 2"}),
      meta("LayersOfNumbers", "layers", "[1,2]", {"layers: found 1, expected an object"}),
      edit("WindowInSparseLayer",
           [](RawIndex& index) { index.set_json("layers", "/1/window", 10); },
           {"layers[1].window: found 10"}),
      edit("LayerSaidToBeDense",
           [](RawIndex& index) { index.set_json("layers", "/1/dense", true); },
           {"layers.1.level.1.centroids", "layers.1.exact.keys"}),
      edit("AllLayersSaidToBeDense",
           [](RawIndex& index) {
             index.set_json("layers", "/0/dense", true);
             index.set_json("layers", "/1/dense", true);
           },
           {"levels: found 2", "every layer is dense"}),
      meta("ModelNotJson", "model", "", {"model: not valid JSON"}),
      meta("ModelKeyTwice", "model", R"({"layers":1,"layers":2})", {"duplicate key \"layers\""}),
      model("ModelNoLayers", "/layers", 0, {"model: layers: found 0"}),
      model("ModelManyLayers", "/layers", 60000, {"sliding_window", "an array of 60000"}),
      model("ModelHeadsDoNotDivide", "/kv_heads", 3, {"kv_heads: found 3", "divisor"}),
      model("ModelOtherHeads", "/kv_heads", 4,
            {"layers.0.level.1.centroids", "BF16[2, 3, 8]", "BF16[4, 3, 8]"}),
      model("ModelOtherDim", "/head_dim", 16, {"BF16[2, 3, 8]", "BF16[2, 3, 16]"}),
      model("ModelHugeDim", "/head_dim", 4097, {"head_dim: found 4097", "4096"}),
      model("ModelDimIsText", "/head_dim", "8", {"head_dim: found \"8\""}),
      model("ModelRopeUnknown", "/rope/kind", "su", {"rope: kind: found \"su\""}),
      model("ModelScaleZero", "/attention_scale", 0.0, {"attention_scale: found 0.0"}),
      model("ModelWindowsTooMany", "/sliding_window", {0, 0, 0},
            {"sliding_window: found an array of 3"}),
  };
}

void retype(RawIndex::Tensor& tensor, const char* dtype, std::vector<int64_t> shape) {
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
}

std::vector<Malformed> bad_tensors() {
  const auto rename = [](const char* name, const char* from, const char* to,
                         std::vector<std::string> says) {
    return edit(
        name, [=](RawIndex& index) { index.at(from).name = to; }, std::move(says));
  };
  const auto reshape = [](const char* name, const char* tensor, const char* dtype,
                          std::vector<int64_t> shape, std::vector<std::string> says) {
    return edit(
        name, [=](RawIndex& index) { retype(index.at(tensor), dtype, shape); }, std::move(says));
  };
  return {
      rename("CentroidsMissing", "layers.1.level.2.centroids", "x",
             {"\"layers.1.level.2.centroids\"", "found nothing"}),
      rename("OffsetsMissing", "layers.0.level.1.offsets", "x",
             {"\"x\"", "expected tensor \"layers.0.level.1.offsets\" here"}),
      rename("PositionsMissing", "layers.0.positions", "layers.0.position", {"layers.0.positions"}),
      rename("KeysMissing", "layers.0.keys", "layers.0.key", {"layers.0.keys"}),
      rename("CalibrationMissing", "calibration.shares", "calibration.share",
             {"calibration.shares"}),
      edit("LastLayerMissing",
           [](RawIndex& index) {
             const size_t first = index.place("layers.1.positions");
             const size_t last = index.place("calibration.thresholds");
             index.tensors.erase(index.tensors.begin() + static_cast<ptrdiff_t>(first),
                                 index.tensors.begin() + static_cast<ptrdiff_t>(last));
           },
           {"tensor \"calibration.thresholds\"", "layers.1.positions"}),
      edit("ExtraTensor",
           [](RawIndex& index) {
             index.tensors.insert(index.tensors.begin() + 3,
                                  {"more", "U8", {64}, std::string(64, 'x')});
           },
           {"tensor \"more\""}),
      edit("ExtraTensorBeforeTheHash",
           [](RawIndex& index) {
             index.tensors.insert(index.tensors.end() - 1,
                                  {"more", "U8", {64}, std::string(64, 'x')});
           },
           {"tensor \"more\"", "header.xxh3_128"}),
      edit("Swapped",
           [](RawIndex& index) {
             std::swap(index.at("layers.0.keys"), index.at("layers.0.values"));
           },
           {"tensor \"layers.0.values\"", "\"layers.0.keys\" here"}),
      reshape("KeysOfOtherDType", "layers.0.keys", "F16", {2, 56, 8}, {"F16[2, 56, 8]", "BF16"}),
      reshape("PositionsSigned", "layers.0.positions", "I32", {2, 56},
              {"I32[2, 56]", "U32[2, 56]"}),
      reshape("PositionsTransposed", "layers.0.positions", "U32", {56, 2}, {"U32[56, 2]"}),
      reshape("KeysFlat", "layers.0.keys", "BF16", {2, 448}, {"BF16[2, 448]"}),
      reshape("CentroidsFlat", "layers.0.level.1.centroids", "BF16", {48},
              {"layers.0.level.1.centroids", "[48]", "[2, clusters, 8]"}),
      reshape("CentroidsOfOtherHeads", "layers.0.level.1.centroids", "BF16", {1, 6, 8},
              {"layers.0.level.1.centroids", "BF16[1, 6, 8]"}),
      edit("NoClusters",
           [](RawIndex& index) {
             auto& tensor = index.at("layers.0.level.1.centroids");
             retype(tensor, "BF16", {2, 0, 8});
             tensor.data.clear();
           },
           {"layers.0: clusters: found 0, expected at least 1"}),
      edit("MoreClustersThanKeys",
           [](RawIndex& index) {
             auto& tensor = index.at("layers.0.level.2.centroids");
             retype(tensor, "BF16", {2, 57, 8});
             tensor.data.resize(2 * 57 * 8 * 2);
           },
           {"layers.0: clusters: found 57", "at most 56"}),
      edit("CoarserLevelHasMoreClusters",
           [](RawIndex& index) {
             auto& tensor = index.at("layers.0.level.2.centroids");
             retype(tensor, "BF16", {2, 2, 8});
             tensor.data.resize(2 * 2 * 8 * 2);
           },
           {"layers.0: clusters: found 2, expected at least 3"}),
      edit("OffsetsOneShort",
           [](RawIndex& index) {
             auto& tensor = index.at("layers.0.level.1.offsets");
             retype(tensor, "U32", {2, 3});
             tensor.data.resize(24);
             index.tensors[index.place("layers.0.level.1.offsets") + 1].data.resize(40);
             index.tensors[index.place("layers.0.level.1.offsets") + 1].shape = {40};
           },
           {"layers.0.level.1.offsets", "U32[2, 3]", "U32[2, 4]"}),
      reshape("ThresholdsReshaped", "calibration.thresholds", "F32", {12, 1025},
              {"calibration.thresholds", "F32[12, 1025]", "F32[2, 2, 3, 1025]"}),
      edit("SharesOfOneLayer",
           [](RawIndex& index) {
             auto& tensor = index.at("calibration.shares");
             retype(tensor, "F32", {2, 1, 2, 1025});
             tensor.data.resize(2 * 2 * 1025 * 4);
           },
           {"calibration.shares", "F32[2, 1, 2, 1025]"}),
      edit("NotOnACacheLine",
           [](RawIndex& index) {
             index.tensors.insert(index.tensors.begin() + 1,
                                  {"padding.x", "U8", {32}, std::string(32, '\0')});
           },
           {"layers.0.level.1.offsets", "offset", "a multiple of 64"}),
      edit("LayerNotOnAPage",
           [](RawIndex& index) {
             const size_t at = index.place("layers.1.level.1.centroids");
             index.tensors.insert(index.tensors.begin() + static_cast<ptrdiff_t>(at),
                                  {"padding.x", "U8", {64}, std::string(64, '\0')});
           },
           {"layers.1.level.1.centroids", "offset", "a multiple of 4096"}),
      edit("DataNotOnAPage", [](RawIndex& index) { index.page = 4096 + 64; },
           {"start of the data", "a multiple of 4096"}),
      edit("PaddingOfFloats",
           [](RawIndex& index) {
             auto& tensor = index.at("padding.0");
             retype(tensor, "F32", {static_cast<int64_t>(tensor.data.size()) / 4});
           },
           {"padding.0", "F32", "a padding: U8"}),
      edit("PaddingOfTwoDimensions",
           [](RawIndex& index) {
             index.at("padding.0").shape.insert(index.at("padding.0").shape.begin(), 1);
           },
           {"padding.0", "U8[1, "}),
      edit("HashMissing", [](RawIndex& index) { index.tensors.pop_back(); },
           {"last tensor", "header.xxh3_128"}),
      edit("NoTensors",
           [](RawIndex& index) {
             index.tensors.clear(), index.tensors.push_back({"t", "U8", {0}, ""});
           },
           {"last tensor", "\"t\""}),
      edit("HashTooShort",
           [](RawIndex& index) {
             index.tensors.back().shape = {8};
             index.tensors.back().data.resize(8);
           },
           {"last tensor", "16 bytes"}),
      edit("HashOfOtherType", [](RawIndex& index) { retype(index.tensors.back(), "U32", {4}); },
           {"header.xxh3_128", "U32[4]", "U8[16]"}),
      edit("HashNotLast",
           [](RawIndex& index) { std::swap(index.tensors.back(), index.at("calibration.coarse")); },
           {"last tensor", "\"calibration.coarse\""}),
      edit("HashOfAnotherHeader",
           [](RawIndex& index) {
             index.keep_hash = true;
             index.metadata["sink"] = "3";
             index.metadata["tail"] = "5";
           },
           {"hash of the header", "changed or damaged"}),
  };
}

class SqzMalformed : public ::testing::TestWithParam<Malformed> {};

TEST_P(SqzMalformed, IsRefusedAtOpenByName) {
  testing::TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  RawIndex good = RawIndex::read(path);
  testing::write_file(path, GetParam().make(good));
  for (const OpenMode mode : {OpenMode::kMmap, OpenMode::kRead}) {
    const auto file = SqzFile::open(path, mode);
    ASSERT_FALSE(file.ok());
    const std::string message = file.status().message();
    EXPECT_EQ(file.status().code(), GetParam().code) << message;
    EXPECT_THAT(message, ::testing::StartsWith(path + ": "));
    for (const std::string& part : GetParam().says) EXPECT_THAT(message, HasSubstr(part));
    EXPECT_EQ(message.find('\n'), std::string::npos) << "one sentence";
  }
}

const auto kName = [](const auto& test) { return test.param.name; };
INSTANTIATE_TEST_SUITE_P(Foreign, SqzMalformed, ::testing::ValuesIn(foreign_files()), kName);
INSTANTIATE_TEST_SUITE_P(Metadata, SqzMalformed, ::testing::ValuesIn(bad_metadata()), kName);
INSTANTIATE_TEST_SUITE_P(Tensors, SqzMalformed, ::testing::ValuesIn(bad_tensors()), kName);

TEST(SqzMalformed, AnotherWritersPaddingsAndOrderOfKeysAreFine) {
  testing::TemporaryDirectory dir;
  const std::string path = dir.file("x.sqz");
  ASSERT_TRUE(testing::write_tiny_index(path).ok());
  RawIndex index = RawIndex::read(path);
  index.tensors.insert(index.tensors.begin() + 1,
                       {"padding.more", "U8", {4096}, std::string(4096, '\0')});
  index.metadata["note"] = "unknown keys are left alone";
  testing::write_file(path, index.bytes());
  const auto file = SqzFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_THAT((*file)->verify()->problems, ::testing::IsEmpty());
}

}  // namespace
}  // namespace sqz
