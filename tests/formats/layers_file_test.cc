// Layer profiles: what is written comes back, and nothing else is taken for one.
#include "formats/layers_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_layers.h"
#include "tests/formats/malformed_file.h"

namespace sqz {
namespace {

using ::testing::Contains;
using testing::four_layers;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::meta;
using testing::RawIndex;
using testing::TemporaryDirectory;
using testing::value;
using testing::without;
using testing::Wrong;

std::string write(const std::string& path, const LayersFile& f = four_layers()) {
  const auto bytes = write_layers_file(Env::posix(), path, true, f);
  EXPECT_TRUE(bytes.ok()) << bytes.status().message();
  return path;
}

TEST(LayersFile, ComesBackAsItWasWritten) {
  TemporaryDirectory dir;
  const std::string path = dir.file("l.sqz");
  const LayersFile f = four_layers();
  const auto bytes = write_layers_file(Env::posix(), path, false, f);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  EXPECT_EQ(*bytes, testing::read_file(path).size());
  const auto back = read_layers_file(path);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_THAT(back->producer, ::testing::StartsWith("sqz "));
  EXPECT_EQ(back->model, f.model);
  EXPECT_EQ(back->tokenizer_hash, f.tokenizer_hash);
  EXPECT_EQ(back->texts, 2);
  EXPECT_EQ(back->windows, 3);
  EXPECT_EQ(back->window, 500);
  EXPECT_EQ(back->tokens, 1234);
  EXPECT_EQ(back->allocation, "groups");
  EXPECT_EQ(back->context, 1000);
  EXPECT_EQ(back->uniform_budget, 100);
  EXPECT_EQ(back->p, 0.3);
  EXPECT_EQ(back->cosine, f.cosine);
  EXPECT_EQ(back->cosine_error, f.cosine_error);
  EXPECT_EQ(back->group, f.group);
  EXPECT_EQ(back->budget, f.budget);
  const auto report = verify_layers_file(path);
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->problems, IsEmpty());
  EXPECT_EQ(report->checked, 9);  // four tensors, as many paddings, the header's hash

  EXPECT_EQ(write_layers_file(Env::posix(), path, false, f).status().code(), Code::kExists);
  const std::string first = testing::read_file(path);
  write(path);
  EXPECT_EQ(testing::read_file(path), first) << "the same contents, the same bytes";
}

// docs/format.md, taken at its word.
TEST(LayersFile, IsLaidOutAsTheFormatPageSays) {
  TemporaryDirectory dir;
  const RawIndex raw = RawIndex::read(write(dir.file("l.sqz")));
  const std::string bytes = testing::read_file(dir.file("l.sqz"));
  std::vector<std::string> names;
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  size_t at = 8 + length;
  EXPECT_EQ(at % 4096, 0u);
  for (const auto& tensor : raw.tensors) {
    const bool padding = tensor.name.starts_with("padding.");
    if (padding) {
      EXPECT_EQ(tensor.data.find_first_not_of('\0'), std::string::npos);
    } else {
      EXPECT_EQ(at % 64, 0u) << tensor.name;
      names.push_back(concat(tensor.name, " ", tensor.dtype, " ", tensor.shape.at(0)));
    }
    at += tensor.data.size();
  }
  EXPECT_THAT(names, ::testing::ElementsAre("cosine F64 4", "cosine_error F64 4", "group I32 4",
                                            "budget I64 4", "header.xxh3_128 U8 16"));
  EXPECT_EQ(raw.metadata.at("kind"), "layers");
  EXPECT_EQ(raw.metadata.at("uniform_budget"), "100");
}

TEST(LayersFile, IsToldFromAnIndex) {
  TemporaryDirectory dir;
  write(dir.file("l.sqz"));
  ASSERT_TRUE(testing::write_tiny_index(dir.file("x.sqz")).ok());
  testing::write_file(dir.file("x.txt"), "some text");
  EXPECT_TRUE(has_kind(dir.file("l.sqz"), FileKind::kLayers));
  EXPECT_FALSE(has_kind(dir.file("x.sqz"), FileKind::kLayers));
  EXPECT_FALSE(has_kind(dir.file("x.txt"), FileKind::kLayers));
  EXPECT_FALSE(has_kind(dir.file("none"), FileKind::kLayers));
  const auto index = SqzFile::open(dir.file("l.sqz"));
  EXPECT_EQ(index.status().code(), Code::kUnsupported);
  EXPECT_THAT(index.status().message(), HasSubstr("kind: found \"layers\", expected \"index\""));
  const auto layers = read_layers_file(dir.file("x.sqz"));
  EXPECT_EQ(layers.status().code(), Code::kUnsupported);
  EXPECT_THAT(layers.status().message(), HasSubstr("kind: found \"index\", expected \"layers\""));
  EXPECT_THAT(read_layers_file(dir.file("x.txt")).status().message(),
              HasSubstr("not a layer profile: it begins with \"some text\""));
}

TEST(LayersFile, EveryFlippedBitAndEveryTruncationIsRefused) {
  TemporaryDirectory dir;
  testing::expect_every_damage_refused(testing::read_file(write(dir.file("l.sqz"))), [](Env& env) {
    return read_layers_file("l.sqz", env).status();
  });
}

TEST(LayersFile, AFailureAtAnyCallLeavesNothing) {
  testing::expect_failures_leave_nothing(6, [](Env& env, const std::string& path) {
    return write_layers_file(env, path, false, four_layers()).status();
  });
}

std::vector<Wrong> wrong_headers() {
  return {
      meta("OtherFormat", "format", "pt",
           "not a layer profile: __metadata__: format: found \"pt\""),
      meta("NewerVersion", "format_version", "2", "format_version: found 2", Code::kUnsupported),
      meta("OtherKind", "kind", "qmodel", "kind: found \"qmodel\"", Code::kUnsupported),
      without("NoVersion", "format_version"),
      without("NoKind", "kind"),
      without("NoProducer", "producer"),
      without("NoModel", "model"),
      without("NoTokenizerHash", "tokenizer_hash"),
      without("NoTexts", "texts"),
      without("NoWindows", "windows"),
      without("NoWindow", "window"),
      without("NoTokens", "tokens"),
      without("NoAllocation", "allocation"),
      without("NoContext", "context"),
      without("NoUniformBudget", "uniform_budget"),
      without("NoP", "p"),
      without("NoChecksums", "checksums"),
      meta("TextsNone", "texts", "0", "texts: found 0"),
      meta("WindowNone", "window", "0", "window: found 0"),
      meta("TokensNegative", "tokens", "-1", "tokens: found -1"),
      meta("TokensQuoted", "tokens", "\"9\"", "tokens: found \"9\""),
      meta("TokensTooMany", "tokens", "1501", "tokens: found 1501, expected at most windows"),
      meta("ContextBeyondU32", "context", "4294967296", "context: found 4294967296"),
      meta("BudgetAboveContext", "uniform_budget", "1001",
           "uniform_budget: found 1001, expected an integer in [1, 1000]"),
      meta("BudgetNone", "uniform_budget", "0", "uniform_budget: found 0"),
      meta("PZero", "p", "0", "p: found 0, expected a number in (0, 1]"),
      meta("PAboveOne", "p", "1.5", "p: found 1.5"),
      meta("PIsText", "p", "\"a\"", "p: found \"a\""),
      meta("OtherAllocation", "allocation", "even", "allocation: found \"even\""),
      meta("TokenizerHashBad", "tokenizer_hash", "x", "tokenizer_hash: found \"x\""),
      meta("ModelNotJson", "model", "{", "model: not valid JSON"),
      {"ModelOfTwoLayers",
       [](RawIndex& file) {
         file.set_json("model", "/layers", 2);
         file.set_json("model", "/sliding_window", {0, 0});
       },
       "model: layers: found 2, expected at least 3"},
      {"ModelOfFiveLayers",
       [](RawIndex& file) {
         file.set_json("model", "/layers", 5);
         file.set_json("model", "/sliding_window", {0, 0, 0, 0, 0});
       },
       "tensor \"cosine\": found F64[4], expected F64[5]"},
      {"CosinesOfAnotherType", [](RawIndex& file) { file.at("cosine").dtype = "I64"; },
       "tensor \"cosine\": found I64[4], expected F64[4]"},
      {"TensorRenamed", [](RawIndex& file) { file.at("budget").name = "share"; },
       "tensor \"share\": found it, expected tensor \"budget\" here"},
      {"TensorMissing",
       [](RawIndex& file) {
         file.tensors.erase(file.tensors.begin() + static_cast<ptrdiff_t>(file.place("budget")));
       },
       "tensor \"header.xxh3_128\": found it, expected tensor \"budget\" here"},
      {"TensorTooMany",
       [](RawIndex& file) {
         file.tensors.insert(file.tensors.end() - 1, {"more", "U8", {1}, "x"});
       },
       "tensor \"more\""},
      {"NotOnACacheLine",
       [](RawIndex& file) {
         file.tensors.insert(file.tensors.begin() + static_cast<ptrdiff_t>(file.place("group")),
                             {"padding.x", "U8", {8}, std::string(8, '\0')});
       },
       "tensor \"group\": offset"},
      {"HashMissing", [](RawIndex& file) { file.tensors.pop_back(); }, "last tensor"},
      {"HashOfAnotherHeader",
       [](RawIndex& file) {
         file.keep_hash = true;
         file.metadata["tokens"] = "1235";
       },
       "hash of the header"},
  };
}

std::vector<Wrong> wrong_contents() {
  return {
      value("CosineAboveOne", "cosine", 1, 1.01, "cosine: layer 1: found 1.01"),
      value("CosineNan", "cosine", 3, std::nan(""), "cosine: layer 3: found nan"),
      value("ErrorNegative", "cosine_error", 0, -0.5, "cosine_error: layer 0: found -0.5"),
      value("ErrorInfinite", "cosine_error", 2, INFINITY * 1.0, "cosine_error: layer 2: found inf"),
      value("GroupThree", "group", 2, int32_t{3}, "group: layer 2: found 3, expected 0, 1 or 2"),
      value("GroupNegative", "group", 0, int32_t{-1}, "group: layer 0: found -1"),
      value("GroupEmpty", "group", 2, int32_t{2}, "group: group 1: found no layer"),
      {"GroupsNotByCosine",
       [](RawIndex& file) {
         file.set("group", 0, int32_t{1});
         file.set("group", 2, int32_t{0});
       },
       "group: layer 2: found 0, expected at least 1, as layer 0"},
      value("BudgetZero", "budget", 1, int64_t{0}, "budget: layer 1: found 0"),
      value("BudgetBeyondContext", "budget", 0, int64_t{1001}, "budget: layer 0: found 1001"),
      value("BudgetHuge", "budget", 0, INT64_MAX, "budget: layer 0: found 9223372036854775807"),
      value("BudgetSum", "budget", 0, int64_t{171}, "budget: sum: found 401, expected 400"),
      {"PaddingNotZero", [](RawIndex& file) { file.at("padding.0").data[3] = 'x'; },
       "tensor \"padding.0\": found other bytes"},
  };
}

class LayersMalformed : public ::testing::TestWithParam<Wrong> {};

TEST_P(LayersMalformed, IsRefusedByName) {
  TemporaryDirectory dir;
  const std::string path = write(dir.file("l.sqz"));
  testing::expect_refused(GetParam(), path, [](const std::string& changed) {
    return read_layers_file(changed).status();
  });
}

INSTANTIATE_TEST_SUITE_P(Headers, LayersMalformed, ::testing::ValuesIn(wrong_headers()),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(Contents, LayersMalformed, ::testing::ValuesIn(wrong_contents()),
                         [](const auto& test) { return test.param.name; });

TEST(LayersFile, VerifyNamesAllThatIsWrong) {
  TemporaryDirectory dir;
  const std::string path = write(dir.file("l.sqz"));
  RawIndex raw = RawIndex::read(path);
  raw.set("cosine", 1, 2.0);
  raw.set("budget", 2, int64_t{0});
  testing::write_file(path, raw.bytes());
  const auto report = verify_layers_file(path);
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->problems, Contains(HasSubstr("tensor \"cosine\": XXH3-64")));
  EXPECT_THAT(report->problems, Contains(HasSubstr("tensor \"budget\": XXH3-64")));
  EXPECT_THAT(report->problems, Contains(HasSubstr("cosine: layer 1: found 2")));
  EXPECT_THAT(report->problems, Contains(HasSubstr("budget: layer 2: found 0")));
}

TEST(LayersFile, WhatIsOutOfRangeIsNotWritten) {
  TemporaryDirectory dir;
  const auto refused = [&](const std::function<void(LayersFile&)>& change) {
    LayersFile f = four_layers();
    change(f);
    const auto written = write_layers_file(Env::posix(), dir.file("l.sqz"), false, f);
    EXPECT_EQ(written.status().code(), Code::kInvalidArgument);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
    return written.status().message();
  };
  EXPECT_THAT(refused([](auto& f) { f.group.pop_back(); }),
              HasSubstr("l.sqz: group: found 3 values, expected 4, one a layer"));
  EXPECT_THAT(refused([](auto& f) { f.budget[0] += 1; }), HasSubstr("budget: sum: found 401"));
  EXPECT_THAT(refused([](auto& f) { f.p = 0; }), HasSubstr("p: found 0"));
  EXPECT_THAT(refused([](auto& f) { f.cosine[0] = NAN; }), HasSubstr("cosine: layer 0"));
}

}  // namespace
}  // namespace sqz
