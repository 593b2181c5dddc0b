// sqz-profile-layers from end to end, with the example model.
#include <gmock/gmock.h>

#include <map>
#include <numeric>

#include "tests/formats/raw_safetensors.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kModel = SQZ_SOURCE_DIR "/examples/models/nano";

// More different words than a model could call one thing.
std::string lines(int count) {
  std::string out;
  for (int i = 0; i < count; ++i) {
    out += concat("On day ", i % 97, " the carrier walked ", i * 7 % 31, " miles to the mill.\n");
  }
  return out;
}

class ProfileTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    write_all(path("a.txt"), lines(60));
    write_all(path("b.txt"), lines(30));
  }
  ToolRun profile(std::vector<std::string> more, const std::string& model = kModel,
                  const std::string& threads = "2") const {
    std::vector<std::string> arguments = {"--model", model, "--threads", threads};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run("sqz-profile-layers", arguments);
  }
  ToolRun refused(std::vector<std::string> more, int code, const std::string& says,
                  const std::string& model = kModel) const {
    const std::string before = files();
    more.insert(more.end(), {"-o", path("bad.sqz")});
    const ToolRun result = profile(more, model);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(says));
    EXPECT_EQ(files(), before) << "nothing half-written";
    return result;
  }
  // The example model with other numbers in its config.json.
  std::string changed_model(const std::string& from, const std::string& to) const {
    const std::string model = path("model");
    fs::copy(kModel, model);
    std::string config = read_all(model + "/config.json");
    const size_t at = config.find(from);
    EXPECT_NE(at, std::string::npos);
    write_all(model + "/config.json", config.replace(at, from.size(), to));
    return model;
  }
};

TEST_F(ProfileTool, WritesWhatItSaysAndIndexToolsReadIt) {
  const ToolRun first = profile({path("a.txt"), path("b.txt"), "--tokens", "400", "--windows", "0",
                                 "--budget", "0.25", "--p", "0.4", "-o", path("l.sqz"), "--json"});
  ASSERT_EQ(first.code, 0) << first.err;
  const Json result = first.last();
  EXPECT_EQ(result["bytes"], fs::file_size(path("l.sqz")));
  EXPECT_EQ(result["texts"], 2);
  EXPECT_EQ(result["context"], 400);
  EXPECT_EQ(result["uniform_budget"], 100);
  const auto cosine = result["cosine"].get<std::vector<double>>();
  const auto error = result["cosine_error"].get<std::vector<double>>();
  const auto group = result["group"].get<std::vector<int>>();
  const auto budget = result["budget"].get<std::vector<int64_t>>();
  ASSERT_EQ(cosine.size(), 6u);
  ASSERT_EQ(error.size(), 6u);
  // The model's attention changes the state most in layer 0: tests/golden/profile.json.
  EXPECT_EQ(std::min_element(cosine.begin(), cosine.end()), cosine.begin());
  EXPECT_GT(error[0], 0);
  EXPECT_EQ(group[0], 0);
  EXPECT_EQ(std::accumulate(budget.begin(), budget.end(), int64_t{0}), 600);
  for (size_t l = 0; l < 6; ++l) {
    if (group[l] == 2) {
      EXPECT_EQ(budget[l], 40) << "p of the budget";
    } else {
      EXPECT_GT(budget[l], 100);
    }
  }

  const Json info = run("sqz-index", {"info", path("l.sqz"), "--json"}).last();
  EXPECT_EQ(info["kind"], "layers");
  for (const char* field : {"cosine", "cosine_error", "group", "budget", "p", "tokens", "windows",
                            "fingerprint", "tokenizer_hash", "context"}) {
    EXPECT_EQ(info[field], result[field]) << field;
  }
  const Json verified = run("sqz-index", {"verify", path("l.sqz"), "--json"}).last();
  EXPECT_TRUE(verified["ok"]);
  EXPECT_EQ(verified["checked"], 9);

  // The same texts, the same file, whatever the threads.
  const std::string bytes = read_all(path("l.sqz"));
  for (const char* threads : {"1", "3"}) {
    const ToolRun again =
        profile({path("a.txt"), path("b.txt"), "--tokens", "400", "--windows", "0", "--budget",
                 "0.25", "--p", "0.4", "-o", path("l.sqz"), "--force"},
                kModel, threads);
    ASSERT_EQ(again.code, 0) << again.err;
    EXPECT_TRUE(read_all(path("l.sqz")) == bytes) << threads;
  }
  EXPECT_EQ(files(), "a.txt\nb.txt\nl.sqz\n");
}

// Each line of a table of allocations, by its name.
std::map<std::string, Json> by_name(const Json& sweep) {
  std::map<std::string, Json> out;
  for (const Json& row : sweep) {
    const std::string allocation = row["allocation"];
    out[allocation + (allocation == "groups"     ? concat(" ", row["p"].get<double>())
                      : allocation == "measured" ? concat(" ", row["strength"].get<double>())
                                                 : "")] = row;
  }
  return out;
}

// Sink, tail and centroids are all that this budget pays for: there is nothing to move.
TEST_F(ProfileTool, LayersThatKeepNothingStayAlike) {
  const ToolRun result =
      profile({path("a.txt"), "--tokens", "600", "--held-out", "256", "--budget", "0.213",
               "--selector", "squeezed", "--allocate", "measured", "-o", path("l.sqz"), "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last()["budget"], Json(std::vector<int64_t>(6, 128)));
}

TEST_F(ProfileTool, MeasuresEveryAllocationAtTheSameTotal) {
  for (const std::string selector : {"stream", "squeezed"}) {
    const ToolRun result =
        profile({path("a.txt"), "--tokens", "600", "--held-out", "256", "--budget", "0.3",
                 "--selector", selector, "--allocate", "measured", "--sweep", "p=1,0.6,0.3", "-o",
                 path("l.sqz"), "--force", "--json"});
    ASSERT_EQ(result.code, 0) << result.err;
    const Json last = result.last();
    const auto rows = by_name(last["sweep"]);
    ASSERT_EQ(rows.size(), 5u) << last["sweep"];
    double best = rows.at("uniform")["loss"];
    for (const auto& [name, row] : rows) {
      const auto budget = row["budget"].get<std::vector<int64_t>>();
      EXPECT_EQ(std::accumulate(budget.begin(), budget.end(), int64_t{0}), 6 * 180) << name;
      EXPECT_NEAR(row["gain"], rows.at("uniform")["loss"].get<double>() - row["loss"].get<double>(),
                  1e-9)
          << name;
      if (selector == "stream") {
        EXPECT_NEAR(row["delivered"], 0.3, 2e-3) << name;
      }
      if (name.starts_with("measured")) best = std::min(best, row["loss"].get<double>());
    }
    EXPECT_EQ(rows.at("uniform")["gain"], 0.0);
    EXPECT_NE(rows.at("measured 1")["budget"], rows.at("uniform")["budget"]);
    EXPECT_NE(rows.at("groups 0.6")["loss"], rows.at("uniform")["loss"]);
    // What is written is uniform, or a measured one that was better on the held-out text.
    EXPECT_EQ(last["allocation"], "measured");
    bool found = false;
    for (const auto& [name, row] : rows) {
      if (row["budget"] != last["budget"]) continue;
      found = true;
      EXPECT_LE(row["loss"], rows.at("uniform")["loss"]) << name;
    }
    EXPECT_TRUE(found);
    EXPECT_EQ(run("sqz-index", {"verify", path("l.sqz")}).code, 0);
    EXPECT_EQ(files(), "a.txt\nb.txt\nl.sqz\n") << "no temporary index is left";
    const ToolRun info = run("sqz-index", {"info", path("l.sqz"), "--json"});
    EXPECT_EQ(info.last()["measured"]["selector"], selector);
  }
}

TEST_F(ProfileTool, TakesTheBestPOrUniform) {
  const ToolRun result =
      profile({path("a.txt"), "--tokens", "600", "--held-out", "256", "--budget", "0.2",
               "--selector", "h2o", "--p", "auto", "--sweep", "p=1,0.5", "-o", path("l.sqz")});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("uniform"));
  EXPECT_THAT(result.out, HasSubstr("groups, p = 0.5"));
  EXPECT_THAT(result.out, HasSubstr("<- chosen"));
  EXPECT_THAT(result.out, HasSubstr("recommendation"));
}

TEST_F(ProfileTool, BudgetsAreEmbeddedInAnIndexAndServed) {
  const std::string index = path("x.sqz");
  const auto indexed = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {
        "build", "--model", kModel, path("a.txt"), "-o", index, "--force", "--threads", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run("sqz-index", arguments);
  };
  ASSERT_EQ(indexed({"--heavy-hitters"}).code, 0);
  const auto delivered = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {
        "--model",  kModel,         "--index", index,        "--prompt",
        "On day 5", "--max-tokens", "2",       "--selector", "h2o",
        "--budget", "0.3",          "--json",  "--threads",  "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ToolRun result = run("sqz-generate", arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_NEAR(result.last()["budget"]["delivered"], 0.3, 2e-3);
    return result.last()["text"].get<std::string>();
  };
  delivered({});
  const ToolRun embedded = profile({path("a.txt"), "--index", index, "--budget", "0.3", "--p",
                                    "0.2", "-o", path("l.sqz"), "--json"});
  ASSERT_EQ(embedded.code, 0) << embedded.err;
  EXPECT_EQ(embedded.last()["index"], index);
  const Json info = run("sqz-index", {"info", index, "--json"}).last();
  EXPECT_EQ(info["layer_budgets"]["budget"], embedded.last()["budget"]);
  EXPECT_EQ(info["layer_budgets"]["p"], 0.2);
  EXPECT_EQ(info["heavy_hitters"], true);
  EXPECT_EQ(run("sqz-index", {"verify", index}).code, 0);
  // Embedded or given, the same is served.
  EXPECT_EQ(delivered({}), delivered({"--layers", path("l.sqz")}));
  delivered({"--layers", "uniform"});
  // A build embeds, too.
  ASSERT_EQ(indexed({"--layers", path("l.sqz")}).code, 0);
  EXPECT_EQ(run("sqz-index", {"info", index, "--json"}).last()["layer_budgets"]["budget"],
            info["layer_budgets"]["budget"]);
  EXPECT_THAT(run("sqz-index", {"info", index}).out, HasSubstr("layer budgets"));

  const ToolRun behind =
      profile({path("a.txt"), "--index", index, "--p", "auto", "--held-out", "32700"});
  EXPECT_EQ(behind.code, 2);
  EXPECT_THAT(behind.err, HasSubstr(concat("what ", index, " leaves of the positions")));

  const ToolRun shorter =
      profile({path("a.txt"), "--index", index, "--p", "auto", "--held-out", "128"});
  EXPECT_EQ(shorter.code, 3);
  EXPECT_THAT(shorter.err, HasSubstr("that are held out; pass fewer --held-out"));

  // Texts that the index is not of, and a profile of another model.
  const ToolRun other = profile({path("b.txt"), "--index", index});
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.err, HasSubstr("the context of " + index));
  const std::string model = changed_model("\"rope_theta\": 500000.0", "\"rope_theta\": 10000.0");
  ASSERT_EQ(profile({path("a.txt"), "--tokens", "300", "-o", path("other.sqz")}, model).code, 0);
  const ToolRun refused = indexed({"--layers", path("other.sqz")});
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(refused.err, HasSubstr("rope"));
  EXPECT_THAT(refused.err, HasSubstr("other.sqz"));
}

TEST_F(ProfileTool, AnOutputThatIsAnInputIsRefused) {
  const std::string text = read_all(path("a.txt"));
  const ToolRun result = profile({path("a.txt"), "--force", "-o", path("../work/a.txt")});
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("a.txt: is an input and the output"));
  EXPECT_EQ(read_all(path("a.txt")), text);
}

TEST_F(ProfileTool, RefusesWhatCannotBeMeasured) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), path("a.txt"));
    return more;
  };
  refused(with({"--sweep", "p=1,0"}), 2, "--sweep: p: found 0, expected a number in (0, 1]");
  refused(with({"--sweep", "p=1,x"}), 2, "--sweep: p: found x");
  refused(with({"--sweep", "p="}), 2, "--sweep: found p=, expected a list: p=1,0.9,0.7");
  const std::string listed = "not in {squeezed,quest,ideal,stream,window,h2o}";
  for (const char* selector : {"dense", "psychic", "saap"}) {
    refused(with({"--selector", selector, "--p", "auto"}), 2, concat(selector, " ", listed));
  }
  refused(with({"--allocate", "measured", "--p", "0.5"}), 2, "--allocate measured takes no --p");
  refused(with({"--index", path("x.sqz"), "--tokens", "100"}), 2, "--index brings");
  refused(with({"--p", "auto", "--tokens", "900"}), 3, "a.txt: text: found ");
  refused(with({"--p", "auto", "--tokens", "32000", "--held-out", "1024"}), 2,
          "--tokens: found 32000, expected at most 31743");
  refused(with({"--p", "auto", "--held-out", "40000"}), 2,
          "--held-out: found 40000, expected at most 32766, what a window leaves of the positions");
  for (const char* selector : {"squeezed", "stream"}) {
    refused(with({"--allocate", "measured", "--tokens", "600", "--held-out", "128", "--budget",
                  "0.05", "--selector", selector}),
            2, "--budget: found 0.05, expected more than sink, tail and centroids cost");
  }
  const ToolRun nowhere = profile({path("a.txt")});
  EXPECT_EQ(nowhere.code, 2);
  EXPECT_THAT(nowhere.err, HasSubstr("-o: found none"));
}

TEST_F(ProfileTool, PrintsALineAndABarALayer) {
  const ToolRun result = profile({path("a.txt"), "--tokens", "400", "-o", path("l.sqz")});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("layer   cosine            group    budget  1 - cosine\n"));
  std::istringstream text(result.out);
  int bars = 0;
  size_t longest = 0;
  for (std::string line; std::getline(text, line);) {
    if (line.find("+-") == std::string::npos) continue;
    ++bars;
    longest = std::max(longest, static_cast<size_t>(std::count(line.begin(), line.end(), '#')));
    EXPECT_THAT(line, HasSubstr("  50  ")) << "an eighth of 400 tokens: every layer alike";
  }
  EXPECT_EQ(bars, 6);
  EXPECT_EQ(longest, 40u);
  const ToolRun info = run("sqz-index", {"info", path("l.sqz")});
  EXPECT_EQ(info.out.substr(0, info.out.find("\n\n")),
            result.out.substr(0, result.out.find("\n\n")));
}

TEST_F(ProfileTool, VerifySeesDamage) {
  ASSERT_EQ(profile({path("a.txt"), "--tokens", "300", "-o", path("l.sqz")}).code, 0);
  auto raw = testing::RawIndex::read(path("l.sqz"));
  raw.set("cosine", 1, 0.123);
  write_all(path("l.sqz"), raw.bytes());
  const ToolRun verify = run("sqz-index", {"verify", path("l.sqz"), "--json"});
  EXPECT_EQ(verify.code, 3);
  EXPECT_FALSE(verify.last()["ok"]);
  EXPECT_THAT(verify.last()["problems"].dump(), HasSubstr("cosine"));
  const ToolRun info = run("sqz-index", {"info", path("l.sqz")});
  EXPECT_EQ(info.code, 3);
  EXPECT_THAT(info.err, HasSubstr("tensor \"cosine\": XXH3-64"));
}

TEST_F(ProfileTool, RefusesAnExistingOutputWithoutForce) {
  write_all(path("l.sqz"), "mine");
  const ToolRun result = profile({path("a.txt"), "--tokens", "300", "-o", path("l.sqz")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("--force"));
  EXPECT_EQ(read_all(path("l.sqz")), "mine");
}

TEST_F(ProfileTool, RefusesNumbersOutOfRange) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), path("a.txt"));
    return more;
  };
  refused(with({"--p", "0"}), 2, "p: found 0, expected a number in (0, 1]");
  refused(with({"--p", "1.01"}), 2, "p: found 1.01");
  refused(with({"--p", "nan"}), 2, "p");
  refused(with({"--p", "0.001", "--context", "800"}), 2, "at least one");
  refused(with({"--budget", "0"}), 2, "--budget: expected 1e-09 to 1, found 0");
  refused(with({"--budget", "1.5"}), 2, "--budget: expected 1e-09 to 1, found 1.5");
  refused(with({"--budget", "0.0001", "--context", "1000"}), 2, "budget: found 0");
  refused(with({"--tokens", "0"}), 2, "--tokens");
  refused(with({"--tokens", "32769"}), 2, "--tokens: found 32769, expected at most 32768");
  refused({}, 2, "TEXT");
}

TEST_F(ProfileTool, RefusesTextsThatItCannotProfile) {
  write_all(path("short.txt"), "A few words.\n");
  refused({path("short.txt")}, 3, "short.txt: text: found ");
  refused({path("none.txt")}, 3, "none.txt");
  write_all(path("empty.txt"), "");
  refused({path("empty.txt")}, 3, "empty.txt");
  write_all(path("bad.txt"), "good \xff\n");
  refused({path("bad.txt")}, 3, "bad.txt");
}

TEST_F(ProfileTool, RefusesModelsThatItCannotProfile) {
  refused({path("a.txt")}, 3, path("nowhere"), path("nowhere"));
  const std::string two = changed_model("\"num_hidden_layers\": 6", "\"num_hidden_layers\": 2");
  refused({path("a.txt")}, 3, "layers: found 2, expected at least 3, one a group", two);
}

// Attention that adds nothing leaves every cosine at 1: there is nothing to tell layers apart by.
TEST_F(ProfileTool, RefusesLayersThatAreAlike) {
  const std::string model = path("model");
  fs::copy(kModel, model);
  auto weights = testing::RawIndex::read(model + "/model.safetensors");
  for (auto& tensor : weights.tensors) {
    if (tensor.name.find("o_proj") != std::string::npos) {
      tensor.data.assign(tensor.data.size(), '\0');
    }
  }
  write_all(model + "/model.safetensors", weights.bytes());
  refused({path("a.txt"), "--tokens", "300"}, 3, "cosines: found 1 different one in 6 layers",
          model);
}

TEST_F(ProfileTool, StoppedItLeavesNothing) {
  write_all(path("long.txt"), lines(40000));
  const std::string before = files();
  const ToolRun stopped =
      run(SQZ_PROFILE_LAYERS_TOOL,
          {"--model", kModel, path("long.txt"), "--tokens", "4096", "--windows", "0", "--progress",
           "-o", path("l.sqz")},
          "", {}, [&](pid_t child) { signal_when(child, SIGINT, [&] { return has_spoken(); }); });
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_EQ(files(), before);
}

}  // namespace
}  // namespace sqz
