// Layer profiles: what is written comes back, and nothing else is taken for one.
#include "formats/layers_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_layers.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/fuzz/memory_env.h"

namespace sqz {
namespace {

using testing::four_layers;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;
using Json = nlohmann::json;

TEST(LayersFile, ComesBackAsItWasWritten) {
  TemporaryDirectory dir;
  LayersFile f = four_layers();
  const std::string path = dir.file("l.json");
  for (const JsonText& measured : {JsonText(), JsonText({{"dense_loss", 1.5}})}) {
    f.measured = measured;
    ASSERT_TRUE(write_layers_file(Env::posix(), path, true, f).ok());
    const auto back = read_layers_file(path);
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ(JsonText(to_json(*back)), JsonText(to_json(f)));
    EXPECT_EQ(back->model, f.model);
    EXPECT_EQ(back->budget, f.budget);
    EXPECT_EQ(back->cosine_error, f.cosine_error);  // a third among them
    EXPECT_EQ(back->measured, f.measured);
  }
  EXPECT_EQ(write_layers_file(Env::posix(), path, false, f).code(), Code::kExists);
}

TEST(LayersFile, NoTruncationIsReadAndNoFailureLeavesAnything) {
  TemporaryDirectory dir;
  ASSERT_TRUE(write_layers_file(Env::posix(), dir.file("l.json"), false, four_layers()).ok());
  const std::string text = testing::read_file(dir.file("l.json"));
  for (size_t length = 0; length + 1 < text.size(); ++length) {
    MemoryEnv env(std::as_bytes(std::span(text).first(length)));
    EXPECT_FALSE(read_layers_file("l.json", env).ok()) << length;
  }
  testing::expect_failures_leave_nothing(5, [](Env& env, const std::string& path) {
    return write_layers_file(env, path, false, four_layers());
  });
}

struct Change {
  const char* field;  // a JSON pointer
  Json value;         // discarded: the field is left out
  const char* says;
};

TEST(LayersFile, FieldsThatAreWrongAreNamed) {
  TemporaryDirectory dir;
  const std::string path = dir.file("l.json");
  ASSERT_TRUE(write_layers_file(Env::posix(), path, false, four_layers()).ok());
  const Json whole = Json::parse(testing::read_file(path));
  std::vector<Change> changes = {
      {"/format", "pt", "format: found \"pt\""},
      {"/format_version", 2, "format_version: found 2, expected at most 1"},
      {"/more", 1, "more: found 1, expected no such field"},
      {"/texts", 0, "texts: found 0"},
      {"/tokens", "9", "tokens: found \"9\""},
      {"/window", 4294967296, "window: found 4294967296"},
      {"/context", 1.5, "context: found 1.5"},
      {"/uniform_budget", 1001, "uniform_budget: found 1001, expected an integer in [1, 1000]"},
      {"/p", 0, "p: found 0, expected a number in (0, 1]"},
      {"/p", 1.5, "p: found 1.5"},
      {"/allocation", "even", "allocation: found \"even\", expected \"groups\" or \"measured\""},
      {"/tokenizer_hash", "x", "tokenizer_hash: found \"x\""},
      {"/model", 1, "model: found 1"},
      {"/model/layers", 0, "model: layers: found 0"},
      {"/cosine", 0.5, "cosine: found 0.5, expected an array"},
      {"/cosine/1", 1.01, "cosine[1]: found 1.01"},
      {"/cosine/1", nullptr, "cosine[1]: found null"},
      {"/cosine_error/0", -0.5, "cosine_error[0]: found -0.5"},
      {"/cosine_error", {0.5}, "cosine_error: found 1 values, expected 4, one a layer"},
      {"/group/2", 3, "group[2]: found 3, expected an integer in [0, 2]"},
      {"/group", Json::array(), "group: found 0 values, expected 4"},
      {"/budget/1", 0, "budget[1]: found 0"},
      {"/budget/0", 1001, "budget[0]: found 1001"},
      {"/budget/0", 171, "budget: found a sum of 401, expected 400"},
      {"/budget", {200, 200}, "budget: found 2 values, expected 4"}};
  for (const auto& [name, value] : whole.items()) {
    changes.push_back({name.c_str(), Json(Json::value_t::discarded), "found nothing"});
  }
  for (const Change& change : changes) {
    Json json = whole;
    if (change.value.is_discarded()) {
      json.erase(change.field);
    } else {
      json[Json::json_pointer(change.field)] = change.value;
    }
    testing::write_file(path, json.dump());
    const Status status = read_layers_file(path).status();
    EXPECT_EQ(status.code(),
              std::string(change.field) == "/format_version" ? Code::kUnsupported : Code::kCorrupt);
    EXPECT_THAT(status.message(), HasSubstr(path)) << change.field;
    EXPECT_THAT(status.message(), HasSubstr(change.says)) << change.field;
  }
}

TEST(LayersFile, AFileOfAnotherKindIsRefused) {
  TemporaryDirectory dir;
  ASSERT_TRUE(testing::write_tiny_index(dir.file("x.sqz")).ok());
  testing::write_file(dir.file("x.txt"), "some text");
  testing::write_file(dir.file("x.json"), "[1]");
  for (const char* name : {"x.sqz", "x.txt", "x.json"}) {
    const Status status = read_layers_file(dir.file(name)).status();
    EXPECT_EQ(status.code(), Code::kCorrupt);
    EXPECT_THAT(status.message(), HasSubstr("profile the layers with sqz-profile-layers"));
  }
}

TEST(LayersFile, AFieldOutOfRangeIsNotWritten) {
  TemporaryDirectory dir;
  LayersFile f = four_layers();
  f.budget[0] += 1;
  const Status status = write_layers_file(Env::posix(), dir.file("l.json"), false, f);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("l.json: budget: found a sum of 401"));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

}  // namespace
}  // namespace sqz
