// config.json: what is read, what is refused and in which words.
#include <gtest/gtest.h>

#include <cmath>

#include "formats/checkpoint.h"
#include "tests/formats/schema.h"

namespace sqz {
namespace {

Json llama() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "hidden_act": "silu", "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2})");
}

Json qwen(int version) {
  Json json = llama();
  json["architectures"] = {concat("Qwen", version, "ForCausalLM")};
  return json;
}

Json with(Json base, const Json& changes) {
  for (const auto& [key, value] : changes.items()) base[key] = value;
  return base;
}

Json without(Json base, const std::string& key) {
  base.erase(key);
  return base;
}

ModelConfig parse(const Json& json) {
  const auto config = parse_model_config(json.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : ModelConfig{};
}

TEST(ModelConfig, ReadsLlama) {
  const ModelConfig config = parse(llama());
  const Json model = json_of(to_json(config.description));
  const Json expected = {{"architecture", "LlamaForCausalLM"},
                         {"layers", 3},
                         {"query_heads", 4},
                         {"kv_heads", 2},
                         {"head_dim", 16},
                         {"hidden_size", 64},
                         {"vocab_size", 100},
                         {"max_positions", 4096},
                         {"sliding_window", {0, 0, 0}},
                         {"attention_scale", 0.25}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(model[key], value) << key;
  EXPECT_EQ(model["rope"]["theta"], 500000.0);
  EXPECT_EQ(model["rope"]["kind"], "default");
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.dtype, DType::kBF16);
  EXPECT_EQ(config.bos_token, 1);
  EXPECT_EQ(config.eos_tokens, std::vector<int32_t>{2});
  EXPECT_FALSE(config.qkv_bias || config.o_bias || config.mlp_bias || config.qk_norm ||
               config.tie_embeddings);
}

TEST(ModelConfig, HeadDimMayDifferFromHiddenOverHeads) {
  EXPECT_EQ(parse(with(llama(), {{"head_dim", 48}})).description.head_dim, 48);
  EXPECT_EQ(parse(with(llama(), {{"head_dim", nullptr}})).description.head_dim, 16);
  EXPECT_EQ(parse(qwen(3)).description.head_dim, 128) << "Qwen3's default";
}

TEST(ModelConfig, KvHeadsDefaultToQueryHeads) {
  EXPECT_EQ(parse(without(llama(), "num_key_value_heads")).description.kv_heads, 4);
  EXPECT_EQ(parse(with(qwen(2), {{"num_key_value_heads", nullptr}})).description.kv_heads, 4);
}

TEST(ModelConfig, BiasesAndNormsByArchitecture) {
  const ModelConfig biased = parse(with(llama(), {{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias && biased.mlp_bias);
  const ModelConfig qwen2 = parse(qwen(2));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.o_bias || qwen2.qk_norm);
  const ModelConfig qwen3 = parse(qwen(3));
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias || qwen3.o_bias);
  EXPECT_TRUE(parse(with(qwen(3), {{"attention_bias", true}})).o_bias);
}

TEST(ModelConfig, EndTokensMayBeAList) {
  EXPECT_EQ(parse(with(llama(), {{"eos_token_id", {5, 6, 7}}})).eos_tokens,
            (std::vector<int32_t>{5, 6, 7}));
  EXPECT_TRUE(parse(with(llama(), {{"eos_token_id", nullptr}})).eos_tokens.empty());
}

TEST(ModelConfig, SlidingWindows) {
  using Windows = std::vector<int64_t>;
  const auto windows = [](const Json& json) { return parse(json).description.sliding_window; };
  const Json mistral = with(llama(), {{"architectures", {"MistralForCausalLM"}}});
  EXPECT_EQ(windows(mistral), (Windows{4096, 4096, 4096})) << "the class's default";
  EXPECT_EQ(windows(with(mistral, {{"sliding_window", nullptr}})), (Windows{0, 0, 0}));
  EXPECT_EQ(windows(with(mistral, {{"sliding_window", 128}})), (Windows{128, 128, 128}));
  EXPECT_EQ(windows(with(llama(), {{"sliding_window", 128}})), (Windows{0, 0, 0}));

  const Json qwen2 = with(qwen(2), {{"sliding_window", 128}, {"max_window_layers", 2}});
  EXPECT_EQ(windows(qwen2), (Windows{0, 0, 0})) << "use_sliding_window is false";
  const Json enabled = with(qwen2, {{"use_sliding_window", true}});
  EXPECT_EQ(windows(enabled), (Windows{0, 0, 128}));
  EXPECT_EQ(windows(with(enabled, {{"max_window_layers", 9}})), (Windows{0, 0, 0}));
  EXPECT_EQ(windows(with(enabled, {{"layer_types",
                                    {"sliding_attention", "full_attention", "full_attention"}}})),
            (Windows{128, 0, 0}));
}

TEST(RopeConfig, OldAndNewSpellingsAgree) {
  const Json llama3 = {{"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 1024}};
  const auto rope = [](const Json& json) { return parse(json).description.rope; };
  const RopeDescription old_type =
      rope(with(llama(), {{"rope_scaling", with(llama3, {{"type", "llama3"}})}}));
  const RopeDescription old_rope_type =
      rope(with(llama(), {{"rope_scaling", with(llama3, {{"rope_type", "llama3"}})}}));
  const RopeDescription current = rope(with(
      without(llama(), "rope_theta"),
      {{"rope_parameters", with(llama3, {{"rope_type", "llama3"}, {"rope_theta", 500000.0}})}}));
  EXPECT_EQ(old_type.kind, RopeDescription::Kind::kLlama3);
  EXPECT_EQ(old_type.theta, 500000.0);
  EXPECT_EQ(old_type.factor, 8.0);
  EXPECT_EQ(old_type.low_freq_factor, 1.0);
  EXPECT_EQ(old_type.high_freq_factor, 4.0);
  EXPECT_EQ(old_type.original_max_positions, 1024);
  EXPECT_EQ(old_type, old_rope_type);
  EXPECT_EQ(old_type, current);
}

TEST(RopeConfig, YarnDefaults) {
  const auto rope = [](const Json& block) {
    return parse(with(llama(), {{"rope_scaling", block}})).description.rope;
  };
  RopeDescription yarn = rope({{"type", "yarn"}, {"factor", 4.0}});
  EXPECT_EQ(yarn.original_max_positions, 4096);
  EXPECT_EQ(yarn.beta_fast, 32);
  EXPECT_EQ(yarn.beta_slow, 1);
  EXPECT_TRUE(yarn.truncate);
  EXPECT_NEAR(yarn.attention_factor, 1.138629, 1e-6);  // 0.1 ln 4 + 1
  EXPECT_EQ(rope({{"type", "yarn"}, {"factor", 4.0}, {"attention_factor", 0.5}}).attention_factor,
            0.5);
  yarn = rope({{"type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 512}});
  EXPECT_EQ(yarn.factor, 8.0) << "the ratio of the lengths";
  yarn = rope({{"type", "yarn"}, {"factor", 4.0}, {"mscale", 1.0}, {"mscale_all_dim", 1.0}});
  EXPECT_EQ(yarn.attention_factor, 1.0);
}

using testing::Field;
using testing::Type;

const Field kConfig[] = {
    {"/num_hidden_layers", Type::kInteger, 1, 4096},
    {"/num_attention_heads", Type::kInteger, 1, 65536},
    {"/num_key_value_heads", Type::kInteger, 1, 65536, true},
    {"/head_dim", Type::kInteger, 1, 4096, true},
    {"/hidden_size", Type::kInteger, 1, 2147483648},
    {"/intermediate_size", Type::kInteger, 1, 2147483648},
    {"/vocab_size", Type::kInteger, 1, 2147483648},
    {"/max_position_embeddings", Type::kInteger, 1, 1099511627776},
    {"/rms_norm_eps", Type::kNumber, 0, 1, true},
    {"/rope_theta", Type::kNumber, 1, 1e19, true},
    {"/tie_word_embeddings", Type::kBoolean, 0, 0, true},
    {"/attention_bias", Type::kBoolean, 0, 0, true},
    {"/architectures", Type::kArray},
    {"/architectures/0", Type::kWord, 0, 0, true, Code::kUnsupported},
    {"/hidden_act", Type::kWord, 0, 0, true, Code::kUnsupported},
    {"/torch_dtype", Type::kWord, 0, 0, true, Code::kUnsupported},
};

// Values that do not fit the others, and what is not done; a JSON merge patch of qwen(2) or
// llama().
struct Refused {
  const char* patch;
  const char* field;
  Code code = Code::kCorrupt;
  bool qwen = false;
};
const Refused kRefused[] = {
    {R"({"architectures": ["A", "B"]})", "architectures"},
    {R"({"num_key_value_heads": 3})", "num_key_value_heads"},
    {R"({"num_key_value_heads": null})", "num_key_value_heads", Code::kCorrupt, true},
    {R"({"head_dim": 15})", "head_dim"},
    {R"({"hidden_size": 66})", "hidden_size"},
    {R"({"quantization_config": {"bits": 4}})", "quantization_config", Code::kUnsupported},
    {R"({"eos_token_id": -1})", "eos_token_id"},
    {R"({"eos_token_id": [1, "2"]})", "eos_token_id"},
    {R"({"bos_token_id": [1]})", "bos_token_id"},
    {R"({"rope_scaling": {"type": "dynamic", "factor": 2}})", "type", Code::kUnsupported},
    {R"({"rope_scaling": {"rope_type": "longrope"}})", "rope_type", Code::kUnsupported},
    {R"({"rope_scaling": 8})", "rope_scaling"},
    {R"({"rope_scaling": {"type": "linear"}})", "factor"},
    {R"({"rope_scaling": {"type": "linear", "factor": 0}})", "factor"},
    {R"({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}})",
     "high_freq_factor"},
    {R"({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}})",
     "beta_fast"},
    {R"({"rope_parameters": {"full_attention": {"rope_type": "default"}}})", "full_attention",
     Code::kUnsupported},
    {R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor", Code::kUnsupported},
    {R"({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})",
     "partial_rotary_factor", Code::kUnsupported},
    {R"({"use_sliding_window": true, "layer_types": ["full_attention"]})", "layer_types",
     Code::kCorrupt, true},
    {R"({"use_sliding_window": true, "layer_types": ["full_attention", "x", "full_attention"]})",
     "layer_types[1]", Code::kUnsupported, true},
    {R"({"use_sliding_window": true, "sliding_window": 0})", "sliding_window", Code::kCorrupt,
     true},
};

Status read(const Json& json) {
  return parse_model_config(json.dump(), "DIR/config.json").status();
}

TEST(BadConfig, IsRefusedByName) {
  Json good = llama();
  good.update({{"head_dim", 16}, {"tie_word_embeddings", false}, {"attention_bias", false}});
  testing::expect_all_refused(good, kConfig, "DIR/config.json", read);
  for (const Refused& refused : kRefused) {
    SCOPED_TRACE(refused.patch);
    Json json = refused.qwen ? qwen(2) : llama();
    const Json patch = Json::parse(refused.patch);
    json.update(patch);
    if (refused.qwen && patch.contains("num_key_value_heads")) json.erase("num_key_value_heads");
    testing::expect_refused(read(json), refused.code, "DIR/config.json", refused.field);
  }
  for (const char* text :
       {"", "{", "[1]", R"({"vocab_size": 1, "vocab_size": 2})", "{} {}", "\xff"}) {
    testing::expect_refused(parse_model_config(text, "config.json").status(), Code::kCorrupt,
                            "config.json", "");
  }
}

}  // namespace
}  // namespace sqz
