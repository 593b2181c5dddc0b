// Layer profiles: what is written comes back, and nothing else is taken for one.
#include "formats/layers_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_layers.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/formats/schema.h"

namespace sqz {
namespace {

using testing::four_layers;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;
using testing::Type;

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

const testing::Field kFields[] = {{"/format", Type::kWord},
                                  {"/format_version", Type::kInteger, 1, 9e18},
                                  {"/producer", Type::kText},
                                  {"/model", Type::kObject},
                                  {"/model/layers", Type::kInteger, 1, 65536},
                                  {"/tokenizer_hash", Type::kHash},
                                  {"/texts", Type::kInteger, 1, UINT32_MAX},
                                  {"/windows", Type::kInteger, 1, UINT32_MAX},
                                  {"/window", Type::kInteger, 1, UINT32_MAX},
                                  {"/tokens", Type::kInteger, 1, UINT32_MAX},
                                  {"/allocation", Type::kWord},
                                  {"/context", Type::kInteger, 1, UINT32_MAX},
                                  {"/uniform_budget", Type::kInteger, 1, 1000},
                                  {"/p", Type::kNumber, 0, 1},
                                  {"/cosine", Type::kRow},
                                  {"/cosine/1", Type::kNumber, -1, 1},
                                  {"/cosine_error", Type::kRow},
                                  {"/cosine_error/0", Type::kNumber},
                                  {"/group", Type::kRow},
                                  {"/group/2", Type::kInteger, 0, 2},
                                  {"/budget", Type::kRow},
                                  {"/budget/0", Type::kInteger, 1, 1000}};

TEST(LayersFile, FieldsThatAreWrongAreNamed) {
  TemporaryDirectory dir;
  const std::string path = dir.file("l.json");
  const Json good = json_of(JsonText(to_json(four_layers())));
  const auto read = [&](const Json& json) {
    testing::write_file(path, json.dump());
    return read_layers_file(path).status();
  };
  testing::expect_all_refused(good, kFields, path, read);
  for (const auto& [patch, field, code] :
       {std::tuple(R"({"format_version": 2})", "format_version", Code::kUnsupported),
        {R"({"more": 1})", "more", Code::kCorrupt},
        {R"({"p": 0})", "p", Code::kCorrupt},
        {R"({"cosine_error": [-0.5, 0, 0, 0]})", "cosine_error[0]", Code::kCorrupt},
        {R"({"budget": [171, 30, 170, 30]})", "budget: found a sum of 401, expected 400",
         Code::kCorrupt}}) {
    Json json = good;
    json.update(Json::parse(patch));
    testing::expect_refused(read(json), code, path, field);
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
