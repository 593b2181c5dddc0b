// sqz-bench from end to end, on shapes that take a moment. How fast something is, is not tested.
#include <gmock/gmock.h>

#include "formats/sqz_file.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

class BenchTool : public ToolTest {
 protected:
  ToolRun bench(std::vector<std::string> arguments, const std::string& format = "json") const {
    const bool heads = arguments[0] != "kmeans" && arguments.back() != "--heads=7";
    for (const char* more : {"--tokens=4000", "--kv-heads=2", "--head-dim=32", "--threads=2",
                             "--benchmark_min_time=0.001"}) {
      arguments.emplace_back(more);
    }
    arguments.push_back("--benchmark_format=" + format);
    if (heads) arguments.emplace_back("--heads=4");
    return run(SQZ_BENCH_TOOL, arguments, "", {"TMPDIR=" + path("")});
  }
  // The benchmarks by name.
  std::map<std::string, Json> rows(const std::vector<std::string>& arguments) const {
    const ToolRun result = bench(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    std::map<std::string, Json> out;
    const Json json = Json::parse(result.out, nullptr, false);
    for (const Json& row : json.value("benchmarks", Json::array())) {
      EXPECT_GT(row["real_time"], 0.0) << row;
      std::string name = row["name"];
      out[name.substr(0, name.find("/real_time"))] = row;
    }
    EXPECT_NE(json["context"].value("sqz", ""), "");
    return out;
  }
};

TEST_F(BenchTool, ReadsWhatIsAskedForAndLeavesNothing) {
  auto found = rows({"attend", "--keep=0.25,0.1", "--requests=1,3"});
  ASSERT_EQ(found.size(), 10u);
  EXPECT_EQ(found["attend/dense/requests:3"]["label"], "cpu");
  for (const char* requests : {"1", "3"}) {
    for (const double keep : {0.25, 0.1}) {
      const std::string name = concat("attend/sparse/keep:", keep, "/rule:budget/levels:");
      const Json one = found[concat(name, "1/requests:", requests)];
      const Json two = found[concat(name, "2/requests:", requests)];
      for (const Json& row : {one, two}) {
        ASSERT_TRUE(row.contains("keys")) << name;
        EXPECT_NEAR(row["keys"], keep, 0.02);
        EXPECT_GT(row["keys_a_run"], 1.0);
      }
      // The tree scores fewer centroids.
      EXPECT_LT(two["bytes"].get<double>() - two["keys"].get<double>(),
                one["bytes"].get<double>() - one["keys"].get<double>());
    }
  }
  EXPECT_EQ(files(), "");
}

TEST_F(BenchTool, WritesCsv) {
  for (const char* command : {"attend", "prefill"}) {
    const ToolRun result = bench({command, "--keep=0.25"}, "csv");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("sparse/keep:0.25"));
  }
}

// An index is whole, and serves as it did when it was made.
TEST_F(BenchTool, SavesAndServesIndexes) {
  const std::pair<const char*, std::string> kinds[] = {
      {"squeezed", "/rule:budget/levels:1"}, {"saap", ""}, {"quest", ""}};
  for (const auto& [selector, more] : kinds) {
    SCOPED_TRACE(selector);
    const std::string file = path(concat(selector, ".sqz"));
    const std::vector<std::string> prompt = {"prefill", "--queries=20", "--block=8,0", "--keep=.2",
                                             "--levels=1"};
    std::vector<std::string> make = prompt, serve = prompt;
    for (const std::string& option :
         {concat("--selector=", selector), "--save-index=" + file, std::string("--buckets=40")}) {
      make.push_back(option);
    }
    serve.push_back("--index=" + file);
    auto made = rows(make), served = rows(serve);
    EXPECT_EQ(made.size(), 3u);
    EXPECT_EQ(served.size(), 3u);
    for (const char* block : {"8", "0"}) {
      const std::string name = concat("prefill/sparse/keep:0.2", more, "/queries:20/block:", block);
      ASSERT_TRUE(made[name].contains("keys")) << name;
      EXPECT_NEAR(made[name]["keys"], 0.2, 0.03);
      EXPECT_NEAR(served[name]["keys"], 0.2, 0.03);
    }
    const auto opened = SqzFile::open(file);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    EXPECT_EQ((*opened)->verify().message(), "");
  }
}

TEST_F(BenchTool, BadInput) {
  write_file(path("text.sqz"), "no index");
  const struct {
    std::vector<std::string> arguments;
    int code;
    std::string message;
  } cases[] = {
      {{"juggle"}, 2, "subcommand"},
      {{"attend", "--keep=1.5"}, 2, "--keep"},
      {{"attend", "--keep=nan"}, 2, "--keep"},
      {{"attend", "--selector=saap", "--buckets=9999"}, 2, "--buckets: found 9999"},
      {{"attend", "--heads=7"}, 2, "--heads: found 7, expected a multiple of --kv-heads 2"},
      {{"attend", "--device=tpu"}, 2, "found tpu"},
      {{"kmeans"}, 2, "--device: found cpu, expected cuda or cuda:N"},
      {{"attend", "--device=cuda:99"}, 2, "--device: "},  // no such GPU, or built without CUDA
      {{"attend", "--sparsity=.9"}, 2, "--sparsity"},
      {{"attend", "--benchmark_colour=no"}, 2, "--benchmark_colour"},
      {{"attend", "--index=" + path("none.sqz")}, 3, "none.sqz"},
      {{"attend", "--index=" + path("text.sqz")}, 3, "text.sqz"},
      {{"attend", "--save-index=" + path("text.sqz")}, 1, "text.sqz"},
      {{"attend", "--levels=3"}, 1, "a benchmark failed"},
  };
  for (const auto& one : cases) {
    const ToolRun result = bench(one.arguments);
    EXPECT_EQ(result.code, one.code) << one.message << ": " << result.err;
    EXPECT_THAT(result.err, HasSubstr(one.message));
  }
  EXPECT_EQ(read_file(path("text.sqz")), "no index");
  EXPECT_EQ(files(), "text.sqz\n");
}

}  // namespace
}  // namespace sqz
