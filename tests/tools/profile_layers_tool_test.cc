// sqz-profile-layers from end to end, with the example model.
#include <gmock/gmock.h>

#include <numeric>

#include "formats/layers_file.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

// No two lines are the same.
std::string miles(int count) {
  std::string out;
  for (int i = 0; i < count; ++i) {
    out += concat("On day ", i % 97, " the carrier walked ", i * 7 % 31, " miles to the mill.\n");
  }
  return out;
}

class ProfileTool : public ToolTest {
 protected:
  void SetUp() override {
    write_file(path("a.txt"), miles(60));
    write_file(path("b.txt"), miles(30));
  }
  Json profile(const std::string& more) const {
    return expect({"sqz-profile-layers -m $MODEL " + more});
  }
  // The example model with another config.json.
  void change_model(const std::string& name, const std::string& from, const std::string& to) const {
    fs::copy(kModel, path(name));
    std::string config = read_file(path(name) + "/config.json");
    const size_t at = config.find(from);
    ASSERT_NE(at, std::string::npos);
    write_file(path(name) + "/config.json", config.replace(at, from.size(), to));
  }
  // The example model, but its attention adds nothing: every cosine is 1.
  void make_model_without_attention(const std::string& name) const {
    fs::copy(kModel, path(name));
    auto weights = testing::RawIndex::read(path(name) + "/model.safetensors");
    for (auto& tensor : weights.tensors) {
      if (tensor.name.find("o_proj") == std::string::npos) continue;
      tensor.data.assign(tensor.data.size(), '\0');
    }
    write_file(path(name) + "/model.safetensors", weights.bytes());
  }
};

TEST_F(ProfileTool, WritesWhatItSaysWhateverTheThreads) {
  const std::string command =
      "a.txt b.txt --tokens 400 --windows 0 --budget 0.25 -o l.json --force --threads ";
  const Json result = profile(command + "2");
  EXPECT_EQ(result["texts"], 2);
  EXPECT_EQ(result["context"], 400);
  EXPECT_EQ(result["uniform_budget"], 100);
  EXPECT_EQ(result["p"], 0.35);
  const auto cosine = result["cosine"].get<std::vector<double>>();
  const auto budget = result["budget"].get<std::vector<int64_t>>();
  ASSERT_EQ(cosine.size(), 6u);
  // The model's attention changes the state most in layer 0: tests/golden/profile.json.
  EXPECT_EQ(std::min_element(cosine.begin(), cosine.end()), cosine.begin());
  EXPECT_GT(result["cosine_error"][0], 0);
  EXPECT_EQ(result["group"][0], 0);
  EXPECT_EQ(std::accumulate(budget.begin(), budget.end(), int64_t{0}), 600);
  for (size_t l = 0; l < 6; ++l) {
    if (result["group"][l] == 2) {
      EXPECT_EQ(budget[l], 35) << "p of the budget";
    } else {
      EXPECT_GT(budget[l], 100);
    }
  }
  const std::string text = read_file(path("l.json"));
  const Json file = Json::parse(text);
  for (const auto& [field, value] : file.items()) EXPECT_EQ(value, result[field]) << field;
  EXPECT_TRUE(read_layers_file(path("l.json")).ok());
  EXPECT_EQ(files(), "a.txt\nb.txt\nl.json\n");
  for (const char* threads : {"1", "3"}) {
    profile(command + threads);
    EXPECT_EQ(read_file(path("l.json")), text) << threads;
  }
}

TEST_F(ProfileTool, MeasuredBudgetsHaveTheSameTotalAndAreKeptIfBetter) {
  for (const std::string selector : {"stream", "squeezed"}) {
    const Json result =
        profile(concat("a.txt --tokens 600 --held-out 256 --budget 0.3 --allocate measured -o "
                       "l.json --force --selector ",
                       selector));
    EXPECT_EQ(result["allocation"], "measured");
    EXPECT_EQ(result["measured"]["selector"], selector);
    const Json candidates = result["measured"]["allocations"];
    ASSERT_EQ(candidates.size(), 3u);
    const Json uniform = candidates[0];
    Json best = uniform;
    for (const Json& row : candidates) {
      const auto budget = row["budget"].get<std::vector<int64_t>>();
      EXPECT_EQ(std::accumulate(budget.begin(), budget.end(), int64_t{0}), 6 * 180);
      const double gain = uniform["loss"].get<double>() - row["loss"].get<double>();
      EXPECT_NEAR(row["gain"], gain, 1e-9);
      if (selector == "stream") {
        EXPECT_NEAR(row["delivered"], 0.3, 2e-3);
      }
      if (gain > row["gain_stderr"] && row["loss"] < best["loss"]) best = row;
    }
    EXPECT_EQ(uniform["gain"], 0.0);
    EXPECT_NE(candidates[1]["budget"], uniform["budget"]);
    EXPECT_NE(candidates[1]["loss"], uniform["loss"]);
    EXPECT_EQ(result["budget"], best["budget"]);
    EXPECT_EQ(files(), "a.txt\nb.txt\nl.json\n") << "no temporary index is left";
  }
}

// Sink, tail and centroids cost all of this budget: no key is left to move.
TEST_F(ProfileTool, LayersThatKeepNothingStayAlike) {
  const Json result =
      profile("a.txt --tokens 600 --held-out 256 --budget 0.213 --allocate measured -o l.json");
  EXPECT_EQ(result["budget"], Json(std::vector<int64_t>(6, 128)));
}

TEST_F(ProfileTool, BudgetsAreEmbeddedInAnIndexAndServed) {
  const std::string build = "sqz-index build -m $MODEL a.txt -o x.sqz --force ";
  expect({build + "--heavy-hitters"});
  const auto answer = [&](const std::string& more) {
    const Json result =
        expect({concat("sqz-generate -m $MODEL -i x.sqz -p 'On day 5' --max-tokens 2 --selector "
                       "h2o --budget 0.3 ",
                       more)});
    EXPECT_NEAR(result["budget"]["delivered"], 0.3, 2e-3);
    return result["text"];
  };
  const Json made = profile("a.txt --budget 0.3 --p 0.2 -o l.json");
  const Json given = answer("--layers l.json");
  expect({build + "--heavy-hitters --layers l.json"});
  const Json budgets = expect({"sqz-index info x.sqz"})["layer_budgets"];
  EXPECT_EQ(budgets["budget"], made["budget"]);
  EXPECT_EQ(budgets["p"], 0.2);
  EXPECT_EQ(answer(""), given) << "embedded or given";
  answer("--layers uniform");

  change_model("other", "\"rope_theta\": 500000.0", "\"rope_theta\": 10000.0");
  expect({"sqz-profile-layers -m other a.txt --tokens 300 -o o.json"});
  expect({build + "--layers o.json", 3, {"--layers: o.json", "rope"}});
}

TEST_F(ProfileTool, RefusesBeforeItWrites) {
  write_file(path("short.txt"), "A few words.\n");
  write_file(path("bad.txt"), "good \xff\n");
  write_file(path("mine.json"), "mine");
  change_model("two", "\"num_hidden_layers\": 6", "\"num_hidden_layers\": 2");
  make_model_without_attention("alike");
  const std::string before = files(), text = read_file(path("a.txt"));
  const std::string tool = "sqz-profile-layers -m $MODEL ", a = tool + "a.txt -o l.json ",
                    measured = a + "--allocate measured ";
  expect_all({
      {tool + "-o l.json", 2, {"TEXT"}},
      {tool + "a.txt", 2, {"--output"}},
      {a + "--p 0", 2, {"--p: expected"}},
      {a + "--p 1.01", 2, {"--p: expected"}},
      {a + "--p nan", 2, {"--p"}},
      {a + "--p 0.001 --context 800", 2, {"at least one"}},
      {a + "--budget 1.5", 2, {"--budget: expected"}},
      {a + "--budget 0.0001 --context 1000", 2, {"budget: found 0"}},
      {a + "--tokens 0", 2, {"--tokens"}},
      {a + "--tokens 32769", 2, {"--tokens: found 32769, expected at most 32768"}},
      {measured + "--selector saap", 2, {"saap"}},
      {measured + "--tokens 900", 3, {"a.txt: text: found "}},
      {measured + "--tokens 32000", 2, {"--tokens: found 32000, expected at most 31743"}},
      {measured + "--held-out 40000", 2, {"--held-out: found 40000, expected at most 32766"}},
      {measured + "--tokens 600 --held-out 128 --budget 0.05", 2, {"--budget: found 0.05"}},
      {tool + "a.txt --force -o ../work/a.txt", 2, {"a.txt"}},
      {"sqz-profile-layers -m alike a.txt --force -o alike/config.json", 2, {"is an input"}},
      {tool + "a.txt -o mine.json", 1, {"--force"}},
      {tool + "short.txt -o l.json", 3, {"short.txt: text: found "}},
      {tool + "none.txt -o l.json", 3, {"none.txt"}},
      {tool + "bad.txt -o l.json", 3, {"bad.txt"}},
      {"sqz-profile-layers -m nowhere a.txt -o l.json", 3, {"nowhere"}},
      {"sqz-profile-layers -m two a.txt -o l.json", 3, {"layers: found 2, expected at least 3"}},
      {"sqz-profile-layers -m alike a.txt --tokens 300 -o l.json",
       3,
       {"cosines: found 1 different one in 6 layers"}},
  });
  EXPECT_EQ(files(), before);
  EXPECT_EQ(read_file(path("a.txt")), text);
  EXPECT_EQ(read_file(path("mine.json")), "mine");
}

}  // namespace
}  // namespace sqz
