// Checkpoint directories: single and sharded, and what is missing, cut or wrong in them.
#include "formats/checkpoint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "tests/common/json.h"
#include "tests/common/temporary_directory.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

const std::string kGoldens = SQZ_SOURCE_DIR "/tests/golden/logits/";

// A copy of a golden model in a fresh folder, to be broken.
class CheckpointFolder : public ::testing::Test {
 protected:
  void copy(const std::string& model) {
    for (const auto& entry : fs::directory_iterator(kGoldens + model)) {
      fs::copy(entry.path(), path(entry.path().filename()));
      fs::permissions(path(entry.path().filename()), fs::perms::owner_write, fs::perm_options::add);
    }
  }
  std::string path(const std::string& name) const { return folder_.file(name); }
  std::string read(const std::string& name) const {
    std::ifstream in(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  void change_json(const std::string& name, const std::function<void(Json&)>& change) const {
    Json json = Json::parse(read(name));
    change(json);
    write(name, json.dump());
  }
  // Changes the JSON header of a safetensors file and leaves its data alone.
  void change_header(const std::string& name, const std::function<void(Json&)>& change) const {
    const std::string file = read(name);
    uint64_t length;
    std::memcpy(&length, file.data(), 8);
    Json header = Json::parse(file.substr(8, length));
    change(header);
    const std::string text = header.dump(), data = file.substr(8 + length);
    length = text.size();
    std::string prefix(8, '\0');
    std::memcpy(prefix.data(), &length, 8);
    write(name, prefix + text + data);
  }
  Result<std::unique_ptr<Checkpoint>> open() const { return Checkpoint::open(folder_.path()); }
  void expect_error(Code code, const std::vector<std::string>& parts) const {
    const auto checkpoint = open();
    ASSERT_FALSE(checkpoint.ok());
    EXPECT_EQ(checkpoint.status().code(), code) << checkpoint.status().message();
    for (const std::string& part : parts) {
      EXPECT_NE(checkpoint.status().message().find(part), std::string::npos)
          << checkpoint.status().message();
    }
  }
  std::string hash() const {
    const auto checkpoint = open();
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    return checkpoint.ok() ? (*checkpoint)->config().description.weights_hash : "";
  }

  sqz::testing::TemporaryDirectory folder_;
};

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kShard = "model-00002-of-00004.safetensors";

TEST_F(CheckpointFolder, OpensEveryLayout) {
  for (const auto& entry : fs::directory_iterator(kGoldens)) {
    if (!entry.is_directory()) continue;
    const auto checkpoint = Checkpoint::open(entry.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    const ModelConfig& config = (*checkpoint)->config();
    EXPECT_EQ((*checkpoint)->has("lm_head.weight"), !config.tie_embeddings) << entry.path();
    for (const RequiredTensor& required : required_tensors(config)) {
      const auto tensor = (*checkpoint)->tensor(required.name);
      ASSERT_TRUE(tensor.ok()) << tensor.status().message();
      EXPECT_EQ(tensor->shape, required.shape);
      int64_t elements = 1;
      for (int64_t size : required.shape) elements *= size;
      EXPECT_EQ(static_cast<int64_t>(tensor->data.size()), elements * dtype_size(tensor->dtype));
    }
  }
}

// The bytes are those of the file: checked against the file read another way.
TEST_F(CheckpointFolder, TensorDataIsTheFiles) {
  copy("llama-tied");
  const std::string file = read("model.safetensors");
  uint64_t length;
  std::memcpy(&length, file.data(), 8);
  const Json header = Json::parse(file.substr(8, length));
  const auto checkpoint = open();
  ASSERT_TRUE(checkpoint.ok());
  for (const char* name : {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}) {
    const uint64_t begin = header[name]["data_offsets"][0], end = header[name]["data_offsets"][1];
    const auto tensor = (*checkpoint)->tensor(name);
    ASSERT_TRUE(tensor.ok());
    ASSERT_EQ(tensor->data.size(), end - begin);
    EXPECT_EQ(std::memcmp(tensor->data.data(), file.data() + 8 + length + begin, end - begin), 0);
  }
  const auto absent = (*checkpoint)->tensor("nothing");
  EXPECT_EQ(absent.status().code(), Code::kNotFound);
  EXPECT_NE(absent.status().message().find("nothing"), std::string::npos);
}

TEST_F(CheckpointFolder, GenerationConfigNamesTheEndTokens) {
  copy("llama-tied");
  write("generation_config.json", R"({"eos_token_id": [7, 9]})");
  EXPECT_EQ((*open())->config().eos_tokens, (std::vector<int32_t>{7, 9}));
  change_json("config.json", [](Json& json) { json["eos_token_id"] = 3; });
  write("generation_config.json", "{}");
  EXPECT_EQ((*open())->config().eos_tokens, std::vector<int32_t>{3});
  write("generation_config.json", R"({"eos_token_id": "stop"})");
  expect_error(Code::kCorrupt, {"generation_config.json", "eos_token_id", "\"stop\""});
}

TEST_F(CheckpointFolder, HashTellsModelsApart) {
  copy("llama-yarn-sharded");
  const std::string before = hash();
  EXPECT_EQ(before.size(), 16u);
  EXPECT_EQ(hash(), before);
  change_json("config.json", [](Json& json) { json["bos_token_id"] = 5; });
  EXPECT_EQ(hash(), before) << "config.json is no weight";
  std::string shard = read(kShard);
  shard.back() = static_cast<char>(shard.back() ^ 1);
  write(kShard, shard);
  EXPECT_NE(hash(), before) << "less than 64 KiB are hashed whole";
}

TEST_F(CheckpointFolder, NoConfig) {
  copy("llama-tied");
  fs::remove(path("config.json"));
  expect_error(Code::kNotFound, {"config.json: no such file"});
}

TEST_F(CheckpointFolder, NoWeights) {
  copy("llama-tied");
  fs::remove(path("model.safetensors"));
  expect_error(Code::kNotFound, {"neither model.safetensors nor model.safetensors.index.json"});
  write("pytorch_model.bin", "x");
  expect_error(Code::kNotFound, {"pytorch_model.bin must be saved as safetensors first"});
}

TEST_F(CheckpointFolder, MissingShard) {
  copy("llama-yarn-sharded");
  fs::remove(path(kShard));
  expect_error(Code::kNotFound, {kShard, "no such file", kIndex});
}

TEST_F(CheckpointFolder, TruncatedAnywhere) {
  copy("llama-yarn-sharded");
  const std::string whole = read(kShard);
  for (size_t size :
       {size_t{0}, size_t{7}, size_t{8}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    write(kShard, whole.substr(0, size));
    expect_error(Code::kCorrupt, {kShard});
  }
  write(kShard, whole + "x");
  expect_error(Code::kCorrupt, {kShard});
}

TEST_F(CheckpointFolder, HeaderOfNoise) {
  copy("llama-tied");
  std::string file = read("model.safetensors");
  file[8] = '#';
  write("model.safetensors", file);
  expect_error(Code::kCorrupt, {"model.safetensors"});
}

TEST_F(CheckpointFolder, IndexIsNoJson) {
  copy("llama-yarn-sharded");
  write(kIndex, "{\"weight_map\": ");
  expect_error(Code::kCorrupt, {kIndex});
}

TEST_F(CheckpointFolder, IndexWithoutWeightMap) {
  copy("llama-yarn-sharded");
  for (const char* text : {"{}", "{\"weight_map\": {}}", "{\"weight_map\": [1]}"}) {
    write(kIndex, text);
    expect_error(Code::kCorrupt, {kIndex, "weight_map", "an object of file names"});
  }
  write(kIndex, "[]");
  expect_error(Code::kCorrupt, {kIndex, "top level"});
}

TEST_F(CheckpointFolder, IndexPointsOutside) {
  copy("llama-yarn-sharded");
  for (const char* name : {"../model.safetensors", "/etc/passwd", "..", ""}) {
    change_json(kIndex, [&](Json& json) { json["weight_map"]["model.norm.weight"] = name; });
    expect_error(Code::kCorrupt, {kIndex, "model.norm.weight", "the name of a file beside it"});
  }
  change_json(kIndex, [&](Json& json) { json["weight_map"]["model.norm.weight"] = 3; });
  expect_error(Code::kCorrupt, {kIndex, "model.norm.weight", "found 3"});
}

TEST_F(CheckpointFolder, IndexNamesTheWrongShard) {
  copy("llama-yarn-sharded");
  change_json(kIndex,
              [&](Json& json) { json["weight_map"]["model.embed_tokens.weight"] = kShard; });
  expect_error(Code::kMismatch, {kShard, "model.embed_tokens.weight", "no such tensor", kIndex});
}

TEST_F(CheckpointFolder, MissingTensor) {
  copy("llama-yarn-sharded");
  change_json(kIndex, [](Json& json) { json["weight_map"].erase("model.norm.weight"); });
  expect_error(Code::kNotFound, {"tensor model.norm.weight", "found nothing", "[64]"});
}

TEST_F(CheckpointFolder, MissingTensorOfTheArchitecture) {
  copy("llama-tied");
  change_json("config.json", [](Json& json) { json["tie_word_embeddings"] = false; });
  expect_error(Code::kNotFound, {"lm_head.weight", "[96, 64]"});
  change_json("config.json", [](Json& json) {
    json["tie_word_embeddings"] = true;
    json["architectures"] = {"Qwen2ForCausalLM"};
  });
  expect_error(Code::kNotFound, {"model.layers.0.self_attn.q_proj.bias"});
  change_json("config.json", [](Json& json) { json["architectures"] = {"Qwen3ForCausalLM"}; });
  expect_error(Code::kNotFound, {"model.layers.0.self_attn.q_norm.weight"});
}

TEST_F(CheckpointFolder, WrongShape) {
  copy("llama-tied");
  change_json("config.json", [](Json& json) { json["intermediate_size"] = 65; });
  expect_error(Code::kMismatch, {"model.safetensors", "model.layers.0.mlp.gate_proj.weight: shape",
                                 "found [64, 64], expected [65, 64] by config.json"});
}

TEST_F(CheckpointFolder, WrongDtype) {
  copy("llama-tied");
  change_header("model.safetensors",
                [](Json& header) { header["model.norm.weight"]["dtype"] = "I16"; });
  expect_error(Code::kUnsupported,
               {"model.norm.weight: dtype", "found I16, expected BF16, F16 or F32"});
}

}  // namespace
}  // namespace sqz
