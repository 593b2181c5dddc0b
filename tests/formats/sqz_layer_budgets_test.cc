// Layer budgets and the order of heavy hitters in an index: what is written is read, what is
// malformed is refused at open.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "formats/sqz_file.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RawIndex;
using testing::TemporaryDirectory;

testing::TinyIndexOptions options() {
  testing::TinyIndexOptions o;
  o.heavy_hitters = true;
  o.layer_budgets = {9, 31};
  return o;
}

TEST(SqzLayerBudgets, WhatIsWrittenIsRead) {
  for (const int64_t page_size : {0, 16}) {
    TemporaryDirectory dir;
    auto o = options();
    o.page_size = page_size;
    o.layers = 3;
    o.dense_layers = {1};
    o.layer_budgets = {9, 31, 20};
    const auto written = testing::write_tiny_index(dir.file("x"), o);
    ASSERT_TRUE(written.ok()) << written.status().message();
    const auto file = SqzFile::open(dir.file("x"));
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_THAT((*file)->verify()->problems, IsEmpty());
    EXPECT_TRUE((*file)->metadata().heavy_hitters);
    ASSERT_TRUE((*file)->metadata().layer_budgets);
    const LayerBudgets& budgets = *(*file)->metadata().layer_budgets;
    EXPECT_EQ(budgets.budget, o.layer_budgets);
    EXPECT_EQ(budgets.uniform_budget, 20);
    EXPECT_EQ(budgets.context, 64);
    EXPECT_EQ(budgets.allocation, "groups");
    EXPECT_EQ(budgets.cosine, std::vector<double>(3, 0.5));
    EXPECT_EQ((*file)->layer(1).heavy, nullptr);
    for (const int64_t l : {0, 2}) {
      const LayerView view = (*file)->layer(l);
      ASSERT_NE(view.heavy, nullptr);
      EXPECT_EQ(std::vector<uint32_t>(view.heavy, view.heavy + 2 * view.slots),
                written->layers[static_cast<size_t>(l)].heavy);
    }
  }
  TemporaryDirectory dir;
  ASSERT_TRUE(testing::write_tiny_index(dir.file("x")).ok());
  const auto file = SqzFile::open(dir.file("x"));
  EXPECT_FALSE((*file)->metadata().heavy_hitters);
  EXPECT_FALSE((*file)->metadata().layer_budgets);
  EXPECT_EQ((*file)->layer(0).heavy, nullptr);
}

struct Case {
  const char* name;
  std::function<void(RawIndex&)> change;
  std::vector<std::string> says;
};

// One field of the budgets' JSON text replaced.
Case field(const char* name, const char* from, const char* to, std::vector<std::string> says) {
  return {name,
          [=](RawIndex& index) {
            std::string& text = index.metadata["layer_budgets"];
            const size_t at = text.find(from);
            ASSERT_NE(at, std::string::npos) << text;
            text.replace(at, std::string(from).size(), to);
          },
          std::move(says)};
}

std::vector<Case> refused_at_open() {
  return {
      field("NotJson", "{", "[", {"layer_budgets"}),
      field("NoBudget", "\"budget\"", "\"budgets\"", {"layer_budgets: budget: found nothing"}),
      field("TooFew", "[9,31]", "[40]", {"budget: found 1 values, expected 2, one a layer"}),
      field("TooMany", "[9,31]", "[9,11,20]", {"budget: found 3 values"}),
      field("OtherSum", "[9,31]", "[9,32]", {"budget: found a sum of 41, expected 40"}),
      field("NoKeys", "[9,31]", "[0,40]", {"budget[0]: found 0"}),
      field("BeyondTheContext", "[9,31]", "[65,-25]", {"budget[1]: found -25"}),
      field("Fraction", "[9,31]", "[9.5,30.5]", {"budget[0]: found 9.5"}),
      field("Huge", "[9,31]", "[18446744073709551616,1]",
            {"layer_budgets", "18446744073709551616"}),
      field("NotAList", "[9,31]", "40", {"budget: found 40, expected an array"}),
      field("Cosines", "[0.5,0.5]", "[0.5]", {"cosine: found 1 values"}),
      field("CosineAboveOne", "[0.5,0.5]", "[0.5,1.5]", {"cosine[1]: found 1.5"}),
      field("CosineText", "[0.5,0.5]", "[0.5,\"x\"]", {"cosine[1]"}),
      field("Context", "\"context\":64", "\"context\":0", {"context: found 0"}),
      field("Uniform", "\"uniform_budget\":20", "\"uniform_budget\":65",
            {"uniform_budget: found 65, expected an integer in [1, 64]"}),
      field("P", "\"p\":1.0", "\"p\":0", {"p: found 0"}),
      field("PAboveOne", "\"p\":1.0", "\"p\":1.5", {"p: found 1.5"}),
      field("Allocation", "\"groups\"", "\"\"", {"allocation: found none"}),
      {"HeavyNotBoolean",
       [](RawIndex& index) { index.metadata["heavy_hitters"] = "yes"; },
       {"heavy_hitters: found \"yes\""}},
      {"HeavyDenied",
       [](RawIndex& index) { index.metadata["heavy_hitters"] = "false"; },
       {"layers.0.heavy"}},
      {"HeavyOfAnotherShape",
       [](RawIndex& index) {
         index.at("layers.0.heavy").shape = {1, 112};
       },
       {"layers.0.heavy", "U32[1, 112]", "U32[2, 56]"}},
      {"HeavyOfAnotherType",
       [](RawIndex& index) { index.at("layers.1.heavy").dtype = "F32"; },
       {"layers.1.heavy", "F32[2, 56]"}},
  };
}

class RefusedBudgets : public ::testing::TestWithParam<Case> {};

TEST_P(RefusedBudgets, AtOpen) {
  TemporaryDirectory dir;
  ASSERT_TRUE(testing::write_tiny_index(dir.file("x"), options()).ok());
  RawIndex index = RawIndex::read(dir.file("x"));
  GetParam().change(index);
  testing::write_file(dir.file("x"), index.bytes());
  const auto file = SqzFile::open(dir.file("x"));
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kCorrupt) << file.status().message();
  for (const std::string& text : GetParam().says) {
    EXPECT_THAT(file.status().message(), HasSubstr(text));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, RefusedBudgets, ::testing::ValuesIn(refused_at_open()),
                         [](const auto& test) { return test.param.name; });

TEST(SqzHeavyHitters, AnIndexWithNothingClusteredHasNoOrder) {
  TemporaryDirectory dir;
  auto o = options();
  o.dense_layers = {0, 1};
  const auto written = testing::write_tiny_index(dir.file("x"), o);
  ASSERT_FALSE(written.ok());
  EXPECT_THAT(written.status().message(), HasSubstr("heavy_hitters: found true"));
}

}  // namespace
}  // namespace sqz
