#include "formats/model_description.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/common/json.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

ModelDescription example() {
  ModelDescription model;
  model.architecture = "Qwen3ForCausalLM";
  model.layers = 3;
  model.query_heads = 6;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.hidden_size = 64;
  model.vocab_size = 1000;
  model.max_positions = 32768;
  model.rope = {.kind = RopeDescription::Kind::kYarn,
                .theta = 1e6,
                .factor = 4.0,
                .low_freq_factor = 1.5,
                .high_freq_factor = 3.5,
                .original_max_positions = 8192,
                .beta_fast = 31.0,
                .beta_slow = 0.1,  // not exact in binary: the text must bring it back
                .attention_factor = 1.1386294361119891,
                .truncate = false};
  model.sliding_window = {0, 512, 0};
  model.weights_hash = "00112233445566ff";
  model.attention_scale = 0.25;
  return model;
}

TEST(ModelDescription, JsonBringsEveryFieldBack) {
  const auto text = parse_json(to_json(example()).str(), "m");
  ASSERT_TRUE(text.ok());
  const auto back = model_from_json(text->root(), "m");
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(*back, example());
}

TEST(ModelDescription, NoWindowsIsOneWayOfSayingAllZero) {
  ModelDescription none = example(), zeros = example();
  none.sliding_window = {};
  zeros.sliding_window = {0, 0, 0};
  EXPECT_EQ(fingerprint(none), fingerprint(zeros));
  EXPECT_TRUE(check_same_model(none, zeros, "x.sqz").ok());
}

struct Change {
  const char* field;  // as the message names it
  std::function<void(ModelDescription&)> change;
};

std::vector<Change> changes() {
  using M = ModelDescription;
  return {{"architecture", [](M& m) { m.architecture = "LlamaForCausalLM"; }},
          {"layers", [](M& m) { m.layers = 4; }},
          {"query_heads", [](M& m) { m.query_heads = 8; }},
          {"kv_heads", [](M& m) { m.kv_heads = 3; }},
          {"head_dim", [](M& m) { m.head_dim = 32; }},
          {"hidden_size", [](M& m) { m.hidden_size = 65; }},
          {"vocab_size", [](M& m) { m.vocab_size = 1001; }},
          {"max_positions", [](M& m) { m.max_positions = 1; }},
          {"rope.kind", [](M& m) { m.rope.kind = RopeDescription::Kind::kLlama3; }},
          {"rope.theta", [](M& m) { m.rope.theta = 10000; }},
          {"rope.factor", [](M& m) { m.rope.factor = 8; }},
          {"rope.low_freq_factor", [](M& m) { m.rope.low_freq_factor = 2; }},
          {"rope.high_freq_factor", [](M& m) { m.rope.high_freq_factor = 2; }},
          {"rope.original_max_positions", [](M& m) { m.rope.original_max_positions = 1; }},
          {"rope.beta_fast", [](M& m) { m.rope.beta_fast = 1; }},
          {"rope.beta_slow", [](M& m) { m.rope.beta_slow = 0.2; }},
          {"rope.attention_factor", [](M& m) { m.rope.attention_factor = 1; }},
          {"rope.truncate", [](M& m) { m.rope.truncate = true; }},
          {"sliding_window[2]", [](M& m) { m.sliding_window[2] = 9; }},
          {"weights_hash", [](M& m) { m.weights_hash = "ff"; }},
          {"attention_scale", [](M& m) { m.attention_scale = 0.125; }}};
}

TEST(ModelDescription, EveryFieldCountsAndIsNamed) {
  EXPECT_TRUE(check_same_model(example(), example(), "x.sqz").ok());
  for (const Change& change : changes()) {
    ModelDescription other = example();
    change.change(other);
    EXPECT_NE(fingerprint(other), fingerprint(example())) << change.field;
    const Status status = check_same_model(example(), other, "x.sqz");
    EXPECT_EQ(status.code(), Code::kMismatch) << change.field;
    EXPECT_THAT(status.message(), HasSubstr(std::string(change.field) + ": ")) << change.field;
    EXPECT_THAT(status.message(), ::testing::StartsWith("x.sqz: "));
  }
}

TEST(ModelDescription, MismatchShowsBothValues) {
  ModelDescription other = example();
  other.head_dim = 32;
  EXPECT_EQ(check_same_model(example(), other, "x.sqz").message(),
            "x.sqz: not an index of this model: head_dim: the index was built for 16, this model "
            "has 32");
}

std::string error_of(const Json& json, const std::string& label) {
  const auto text = parse_json(json.dump(), label);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return model_from_json(text->root(), label).status().message();
}

std::string error_after(const char* pointer, const Json& value) {
  Json json = json_of(to_json(example()));
  json[Json::json_pointer(pointer)] = value;
  const std::string error = error_of(json, "f: model");
  EXPECT_NE(error, "") << pointer << " = " << value;
  return error;
}

TEST(ModelDescription, NumbersAreRangeChecked) {
  EXPECT_EQ(error_after("/layers", 0),
            "f: model: layers: found 0, expected an integer in [1, 65536]");
  EXPECT_THAT(error_after("/layers", "3"), HasSubstr("found \"3\""));
  EXPECT_THAT(error_after("/layers", 3.0), HasSubstr("an integer"));
  EXPECT_THAT(error_after("/layers", UINT64_MAX), HasSubstr("18446744073709551615"));
  EXPECT_THAT(error_after("/kv_heads", 7), HasSubstr("kv_heads"));
  EXPECT_THAT(error_after("/query_heads", 65538), HasSubstr("query_heads"));
  EXPECT_THAT(error_after("/kv_heads", 4), HasSubstr("a divisor of query_heads, 6"));
  EXPECT_THAT(error_after("/head_dim", -1), HasSubstr("found -1"));
  EXPECT_THAT(error_after("/vocab_size", -5), HasSubstr("vocab_size"));
  EXPECT_THAT(error_after("/attention_scale", 0.0), HasSubstr("attention_scale"));
  EXPECT_THAT(error_after("/attention_scale", nullptr), HasSubstr("found null"));
  EXPECT_THAT(error_after("/rope/theta", 1e300), HasSubstr("rope: theta"));
  EXPECT_THAT(error_after("/rope/kind", "longrope"), HasSubstr("longrope"));
  EXPECT_THAT(error_after("/rope/truncate", 1), HasSubstr("true or false"));
  EXPECT_THAT(error_after("/rope", 1), HasSubstr("expected an object"));
  EXPECT_THAT(error_after("/sliding_window", Json::array({0})), HasSubstr("an array of 3"));
  EXPECT_THAT(error_after("/sliding_window/1", -1), HasSubstr("found -1"));
  EXPECT_THAT(error_after("/sliding_window/1", 0.5), HasSubstr("found 0.5"));
  EXPECT_THAT(error_after("/architecture", 5), HasSubstr("a string"));
}

TEST(ModelDescription, EveryFieldIsNeeded) {
  const Json whole = json_of(to_json(example()));
  for (const auto& [key, value] : whole.items()) {
    Json json = whole;
    json.erase(key);
    EXPECT_THAT(error_of(json, "f"), HasSubstr(key + ": found nothing"));
  }
  EXPECT_NE(error_of(Json::array(), "f"), "");
}

}  // namespace
}  // namespace sqz
