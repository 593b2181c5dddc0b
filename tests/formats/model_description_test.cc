#include "formats/model_description.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/json.h"
#include "tests/common/must.h"
#include "tests/common/tiny_model.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

ModelDescription example() {
  ModelDescription model = testing::tiny_model(3, 6, 2, 16);
  model.rope = {.kind = RopeDescription::Kind::kYarn,
                .theta = 1e6,
                .factor = 4.0,
                .low_freq_factor = 1.5,
                .high_freq_factor = 3.5,
                .original_max_positions = 8192,
                .beta_fast = 31.0,
                .beta_slow = 0.1,  // not exact in binary: the text must bring it back
                .attention_factor = 1.1386294361119891,
                .truncate = false,
                .rotary_dim = 6};
  model.sliding_window = {0, 512, 0};
  return model;
}

TEST(ModelDescription, NoWindowsIsOneWayOfSayingAllZero) {
  ModelDescription none = example(), zeros = example();
  none.sliding_window = {};
  zeros.sliding_window = {0, 0, 0};
  EXPECT_EQ(fingerprint(none), fingerprint(zeros));
  EXPECT_TRUE(check_same_model(none, zeros, "x.sqz").ok());
}

// Every number, word and truth of the description is changed by itself.
TEST(ModelDescription, EveryFieldCountsAndIsNamed) {
  const auto same = parse_json(to_json(example()).str(), "m");
  EXPECT_EQ(*model_from_json(same->root(), "m"), example());
  EXPECT_TRUE(check_same_model(example(), example(), "x.sqz").ok());
  const Json whole = json_of(to_json(example())).flatten();
  for (const auto& [pointer, value] : whole.items()) {
    SCOPED_TRACE(pointer);
    if (pointer == "/layers") continue;  // there is one window a layer
    Json json = whole;
    if (pointer == "/kv_heads") {
      json[pointer] = 3;
    } else if (pointer == "/rope/kind") {
      json[pointer] = "llama3";
    } else if (value.is_string()) {
      json[pointer] = value.get<std::string>() + "x";
    } else if (value.is_boolean()) {
      json[pointer] = !value.get<bool>();
    } else if (value.is_number_integer()) {
      json[pointer] = value.get<int64_t>() * 2 + 2;
    } else {
      json[pointer] = value.get<double>() * 2;
    }
    const auto text = parse_json(json.unflatten().dump(), "m");
    const auto other = must(model_from_json(text->root(), "m"));
    EXPECT_NE(fingerprint(other), fingerprint(example()));
    std::string field = pointer.substr(pointer.rfind('/') + 1);
    if (pointer.starts_with("/sliding_window")) field = concat("sliding_window[", field, "]");
    const Status status = check_same_model(example(), other, "x.sqz");
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr(field + ": "));
    EXPECT_THAT(status.message(), ::testing::StartsWith("x.sqz: "));
  }
}

TEST(ModelDescription, LayersThatDiffer) {
  const auto read = [](const char* geometry) {
    Json json = json_of(to_json(example()));
    json["geometry"] = Json::parse(geometry);
    return must(model_from_json(parse_json(json.dump(), "m")->root(), "m"));
  };
  // Entries that say nothing new are one way of having none.
  EXPECT_EQ(
      read(R"([null, {"kind": "recent", "head_dim": 16, "value_dim": 16}, {"kind": "full"}])"),
      example());
  const char* text =
      R"([{"kind":"full","value_dim":8},{"kind":"recent","kv_heads":6},{"kind":"shared","of":0}])";
  const ModelDescription model = read(text);
  EXPECT_EQ(json_of(to_json(model))["geometry"].dump(), text);
  EXPECT_EQ(model.layer(2).value_dim, 8);
  EXPECT_EQ(model.layer(1).group_size(), 1);
  EXPECT_FALSE(model.may_select(1));
  const auto difference = [&](const char* other) {
    return check_same_model(model, read(other), "x.sqz").message();
  };
  EXPECT_THAT(
      difference(R"([{"kind": "full", "value_dim": 8}, null, {"kind": "shared", "of": 0}])"),
      HasSubstr("geometry[1].kv_heads: the index was built for 6, this model has 2"));
  EXPECT_THAT(difference(R"([null, {"kind": "recent", "kv_heads": 6}, {"kind": "state"}])"),
              HasSubstr("geometry[0].value_dim"));
  EXPECT_THAT(check_same_model(model, example(), "x.sqz").message(),
              HasSubstr("geometry[0].value_dim"));
}

}  // namespace
}  // namespace sqz
