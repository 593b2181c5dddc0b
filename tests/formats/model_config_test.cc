// config.json: what is read, what is refused and in which words.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "formats/checkpoint.h"
#include "tests/common/json.h"

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
  const ModelDescription& model = config.description;
  EXPECT_EQ(model.architecture, "LlamaForCausalLM");
  EXPECT_EQ(model.layers, 3);
  EXPECT_EQ(model.query_heads, 4);
  EXPECT_EQ(model.kv_heads, 2);
  EXPECT_EQ(model.head_dim, 16);
  EXPECT_EQ(model.hidden_size, 64);
  EXPECT_EQ(model.vocab_size, 100);
  EXPECT_EQ(model.max_positions, 4096);
  EXPECT_EQ(model.sliding_window, (std::vector<int64_t>{0, 0, 0}));
  EXPECT_EQ(model.attention_scale, 0.25);
  EXPECT_EQ(model.rope.theta, 500000.0);
  EXPECT_EQ(model.rope.kind, RopeDescription::Kind::kDefault);
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

TEST(RopeConfig, ThetaInsideTheBlockWins) {
  const Json json = with(llama(), {{"rope_parameters", {{"rope_theta", 1234.0}}}});
  EXPECT_EQ(parse(json).description.rope.theta, 1234.0);
  EXPECT_EQ(parse(without(llama(), "rope_theta")).description.rope.theta, 10000.0);
}

struct Bad {
  std::string name;
  Json json;
  Code code;
  std::string message;  // what the message must contain
};
void PrintTo(const Bad& bad, std::ostream* out) {
  *out << bad.name;
}

std::vector<Bad> bad_configs() {
  const Json base = llama();
  const auto set = [&](const Json& changes) { return with(base, changes); };
  const auto rope = [&](const Json& block) { return set({{"rope_scaling", block}}); };
  const Code corrupt = Code::kCorrupt, unsupported = Code::kUnsupported;
  return {
      {"not_an_object", Json::array({1}), corrupt,
       "top level: found an array of 1, expected an object"},
      {"no_architecture", without(base, "architectures"), corrupt, "architectures: found nothing"},
      {"two_architectures", set({{"architectures", {"A", "B"}}}), corrupt,
       "architectures: found an array of 2"},
      {"other_architecture", set({{"architectures", {"GPT2LMHeadModel"}}}), unsupported,
       "architectures: found \"GPT2LMHeadModel\", expected one of LlamaForCausalLM"},
      {"no_layers", without(base, "num_hidden_layers"), corrupt,
       "num_hidden_layers: found nothing, expected an integer in [1, 4096]"},
      {"zero_layers", set({{"num_hidden_layers", 0}}), corrupt, "num_hidden_layers: found 0"},
      {"many_layers", set({{"num_hidden_layers", 1 << 30}}), corrupt, "found 1073741824"},
      {"negative_hidden", set({{"hidden_size", -64}}), corrupt, "hidden_size: found -64"},
      {"huge_vocab", set({{"vocab_size", std::numeric_limits<uint64_t>::max()}}), corrupt,
       "vocab_size: found 18446744073709551615"},
      {"fractional_hidden", set({{"hidden_size", 64.5}}), corrupt, "hidden_size: found 64.5"},
      {"text_hidden", set({{"hidden_size", "64"}}), corrupt, "hidden_size: found \"64\""},
      {"null_positions", set({{"max_position_embeddings", nullptr}}), corrupt,
       "max_position_embeddings: found null"},
      {"kv_heads_do_not_divide", set({{"num_key_value_heads", 3}}), corrupt,
       "num_key_value_heads: found 3, expected a divisor of num_attention_heads, 4"},
      {"kv_heads_missing_for_qwen", without(qwen(2), "num_key_value_heads"), corrupt,
       "num_key_value_heads: found nothing"},
      {"odd_head_dim", set({{"head_dim", 15}}), corrupt, "head_dim: found 15, expected an even"},
      {"hidden_does_not_divide", set({{"hidden_size", 66}}), corrupt,
       "hidden_size: found 66, expected a multiple of num_attention_heads, 4"},
      {"no_intermediate", without(base, "intermediate_size"), corrupt, "intermediate_size"},
      {"negative_eps", set({{"rms_norm_eps", -1e-5}}), corrupt, "rms_norm_eps: found -1e-05"},
      {"gelu", set({{"hidden_act", "gelu"}}), unsupported,
       "hidden_act: found \"gelu\", expected \"silu\""},
      {"text_tie", set({{"tie_word_embeddings", "yes"}}), corrupt,
       "tie_word_embeddings: found \"yes\", expected true or false"},
      {"float8", set({{"torch_dtype", "float8_e4m3fn"}}), unsupported,
       "torch_dtype: found \"float8_e4m3fn\", expected bfloat16, float16 or float32"},
      {"quantised", set({{"quantization_config", {{"bits", 4}}}}), unsupported,
       "quantization_config: found an object, expected unquantised weights"},
      {"negative_eos", set({{"eos_token_id", -1}}), corrupt, "eos_token_id: found -1"},
      {"text_in_eos_list", set({{"eos_token_id", {1, "2"}}}), corrupt, "eos_token_id: found \"2\""},
      {"rope_dynamic", rope({{"type", "dynamic"}, {"factor", 2.0}}), unsupported,
       "rope_scaling.type: found \"dynamic\", expected \"default\", \"linear\", \"llama3\""},
      {"rope_longrope", rope({{"rope_type", "longrope"}}), unsupported,
       "rope_scaling.rope_type: found \"longrope\""},
      {"rope_not_an_object", rope(8), corrupt, "rope_scaling: found 8"},
      {"rope_no_factor", rope({{"type", "linear"}}), corrupt, "rope_scaling.factor: found nothing"},
      {"rope_zero_factor", rope({{"type", "linear"}, {"factor", 0}}), corrupt,
       "rope_scaling.factor: found 0"},
      {"rope_llama3_order",
       rope({{"type", "llama3"}, {"factor", 8}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}),
       corrupt, "high_freq_factor: found 4, expected more than low_freq_factor, 4"},
      {"rope_yarn_betas",
       rope({{"type", "yarn"}, {"factor", 4}, {"beta_fast", 1}, {"beta_slow", 2}}), corrupt,
       "beta_fast: found 1, expected at least beta_slow, 2"},
      {"rope_per_layer_type",
       set({{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}}), unsupported,
       "rope_parameters.full_attention: found RoPE parameters of one kind of layer"},
      {"rope_partial", set({{"partial_rotary_factor", 0.5}}), unsupported,
       "partial_rotary_factor: found 0.5"},
      {"rope_theta_zero", set({{"rope_theta", 0}}), corrupt, "rope_theta: found 0"},
      {"layer_types_too_few",
       with(qwen(2), {{"use_sliding_window", true}, {"layer_types", {"full_attention"}}}), corrupt,
       "layer_types: found an array of 1, expected an array of 3 strings"},
      {"layer_types_unknown",
       with(qwen(2), {{"use_sliding_window", true},
                      {"layer_types", {"full_attention", "linear_attention", "full_attention"}}}),
       unsupported, "layer_types[1]: found \"linear_attention\""},
      {"window_zero", with(qwen(2), {{"use_sliding_window", true}, {"sliding_window", 0}}), corrupt,
       "sliding_window: found 0"},
  };
}

class BadConfig : public testing::TestWithParam<Bad> {};

TEST_P(BadConfig, IsRefusedByName) {
  const auto config = parse_model_config(GetParam().json.dump(), "DIR/config.json");
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), GetParam().code);
  EXPECT_TRUE(config.status().message().starts_with("DIR/config.json: "))
      << config.status().message();
  EXPECT_NE(config.status().message().find(GetParam().message), std::string::npos)
      << config.status().message();
}

INSTANTIATE_TEST_SUITE_P(Classes, BadConfig, testing::ValuesIn(bad_configs()),
                         [](const auto& test) { return test.param.name; });

TEST(BadConfigText, IsRefused) {
  for (const char* text : {"", "{", "{\"vocab_size\": 1, \"vocab_size\": 2}", "{} {}", "\xff"}) {
    const auto config = parse_model_config(text, "config.json");
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_EQ(config.status().code(), Code::kCorrupt) << text;
    EXPECT_NE(config.status().message().find("config.json"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sqz
