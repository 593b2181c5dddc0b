// Checkpoint directories: single and sharded, and what is missing, cut or wrong in them.
#include "formats/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "tests/common/json.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;
using testing::RawIndex;

const std::string kGoldens = SQZ_SOURCE_DIR "/tests/golden/logits/";

// A copy of a golden model in a fresh folder, to be broken.
class CheckpointFolder : public ::testing::Test {
 public:
  void copy(const std::string& model) {
    for (const auto& entry : fs::directory_iterator(kGoldens + model)) {
      fs::copy(entry.path(), path(entry.path().filename()));
      fs::permissions(path(entry.path().filename()), fs::perms::owner_write, fs::perm_options::add);
    }
  }
  std::string path(const std::string& name) const { return folder_.file(name); }
  std::string read(const std::string& name) const { return sqz::testing::read_file(path(name)); }
  void write(const std::string& name, const std::string& text) const {
    sqz::testing::write_file(path(name), text);
  }
  void change_json(const std::string& name, const std::function<void(Json&)>& change) const {
    Json json = Json::parse(read(name));
    change(json);
    write(name, json.dump());
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
    const auto checkpoint = must(Checkpoint::open(entry.path()));
    const ModelConfig& config = checkpoint->config();
    EXPECT_EQ(checkpoint->has("lm_head.weight"), !config.tie_embeddings) << entry.path();
    for (const RequiredTensor& required : required_tensors(config)) {
      const auto tensor = must(checkpoint->tensor(required.name));
      EXPECT_EQ(tensor.shape, required.shape);
      int64_t elements = 1;
      for (int64_t size : required.shape) elements *= size;
      EXPECT_EQ(static_cast<int64_t>(tensor.data.size()), elements * dtype_size(tensor.dtype));
    }
  }
}

// The bytes are those of the file: checked against the file read another way.
TEST_F(CheckpointFolder, TensorDataIsTheFiles) {
  copy("llama-tied");
  const auto checkpoint = must(open());
  RawIndex raw = RawIndex::read(path("model.safetensors"));
  for (const char* name : {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}) {
    const auto data = checkpoint->tensor(name)->data;
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(data.data()), data.size()),
              raw.at(name).data);
  }
  EXPECT_EQ(checkpoint->tensor("nothing").status().code(), Code::kNotFound);
}

TEST_F(CheckpointFolder, GenerationConfigNamesTheEndTokens) {
  copy("llama-tied");
  write("generation_config.json", R"({"eos_token_id": [7, 9]})");
  EXPECT_EQ((*open())->config().eos_tokens, (std::vector<int32_t>{7, 9}));
  change_json("config.json", [](Json& json) { json["eos_token_id"] = 3; });
  write("generation_config.json", "{}");
  EXPECT_EQ((*open())->config().eos_tokens, std::vector<int32_t>{3});
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

// One mistake in a good folder.
struct Mistake {
  const char* model;
  std::function<void(const CheckpointFolder&)> make;
  Code code;
  std::vector<std::string> says;  // file and field
};

TEST_F(CheckpointFolder, MistakesAreNamed) {
  const auto remove = [](const char* name) {
    return [=](const CheckpointFolder& folder) { fs::remove(folder.path(name)); };
  };
  const auto config = [](const Json& patch) {
    return [=](const CheckpointFolder& folder) {
      folder.change_json("config.json", [&](Json& json) { json.update(patch); });
    };
  };
  const auto index = [](const char* tensor, const Json& shard) {
    return [=](const CheckpointFolder& folder) {
      folder.change_json(kIndex, [&](Json& json) {
        json["weight_map"][tensor] = shard;
        if (shard.is_null()) json["weight_map"].erase(tensor);
      });
    };
  };
  const auto text = [](const char* name, const std::string& content) {
    return [=](const CheckpointFolder& folder) { folder.write(name, content); };
  };
  const char *tied = "llama-tied", *sharded = "llama-yarn-sharded", *norm = "model.norm.weight";
  const char* single = "model.safetensors";
  std::vector<Mistake> mistakes = {
      {tied, remove("config.json"), Code::kNotFound, {"config.json"}},
      {tied, remove(single), Code::kNotFound, {single, kIndex}},
      {tied,
       [&](const CheckpointFolder& folder) {
         remove(single)(folder);
         folder.write("pytorch_model.bin", "x");
       },
       Code::kNotFound,
       {"pytorch_model.bin"}},
      {tied,
       text("generation_config.json", R"({"eos_token_id": "stop"})"),
       Code::kCorrupt,
       {"generation_config.json", "eos_token_id"}},
      {tied, config({{"tie_word_embeddings", false}}), Code::kNotFound, {"lm_head.weight"}},
      {tied,
       config({{"architectures", {"Qwen2ForCausalLM"}}}),
       Code::kNotFound,
       {"model.layers.0.self_attn.q_proj.bias"}},
      {tied,
       config({{"architectures", {"Qwen3ForCausalLM"}}}),
       Code::kNotFound,
       {"model.layers.0.self_attn.q_norm.weight"}},
      {tied,
       config({{"intermediate_size", 65}}),
       Code::kMismatch,
       {single, "model.layers.0.mlp.gate_proj.weight: shape"}},
      {tied,
       [&](const CheckpointFolder& folder) {
         RawIndex raw = RawIndex::read(folder.path(single));
         raw.at(norm).dtype = "I16";
         folder.write(single, raw.bytes());
       },
       Code::kUnsupported,
       {norm, "dtype"}},
      {tied, text(single, "#"), Code::kCorrupt, {single}},
      {sharded, remove(kShard), Code::kNotFound, {kShard, kIndex}},
      {sharded, text(kIndex, "{\"weight_map\": "), Code::kCorrupt, {kIndex}},
      {sharded, text(kIndex, "[]"), Code::kCorrupt, {kIndex}},
      {sharded, text(kIndex, "{}"), Code::kCorrupt, {kIndex, "weight_map"}},
      {sharded, text(kIndex, R"({"weight_map": {}})"), Code::kCorrupt, {kIndex, "weight_map"}},
      {sharded, text(kIndex, R"({"weight_map": [1]})"), Code::kCorrupt, {kIndex, "weight_map"}},
      {sharded, index(norm, 3), Code::kCorrupt, {kIndex, norm}},
      {sharded, index(norm, nullptr), Code::kNotFound, {norm}},
      {sharded,
       index("model.embed_tokens.weight", kShard),
       Code::kMismatch,
       {kShard, "model.embed_tokens.weight", kIndex}},
  };
  for (const char* outside : {"../model.safetensors", "..", ""}) {
    mistakes.push_back({sharded, index(norm, outside), Code::kCorrupt, {kIndex, norm}});
  }
  for (const Mistake& mistake : mistakes) {
    for (const auto& entry : fs::directory_iterator(folder_.path())) fs::remove(entry.path());
    copy(mistake.model);
    mistake.make(*this);
    expect_error(mistake.code, mistake.says);
  }
}

TEST_F(CheckpointFolder, EveryWeightIsNeeded) {
  for (const char* model : {"llama-tied", "llama-llama3-bias", "qwen3"}) {
    for (const auto& entry : fs::directory_iterator(folder_.path())) fs::remove(entry.path());
    copy(model);
    const RawIndex whole = RawIndex::read(path("model.safetensors"));
    for (size_t i = 0; i < whole.tensors.size(); ++i) {
      RawIndex raw = whole;
      raw.tensors.erase(raw.tensors.begin() + static_cast<ptrdiff_t>(i));
      write("model.safetensors", raw.bytes());
      expect_error(Code::kNotFound, {whole.tensors[i].name});
    }
  }
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

}  // namespace
}  // namespace sqz
