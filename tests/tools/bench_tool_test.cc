// sqz-bench from end to end, on shapes that take a moment. What is slow or fast is not tested.
#include <gmock/gmock.h>

#include <fstream>

#include "formats/capture.h"
#include "tests/common/tiny_model.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BenchTool : public ToolTest {
 protected:
  ToolRun bench(std::vector<std::string> arguments) const {
    for (const char* more :
         {"--tokens", "4000", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--repeat",
          "2", "--threads", "2", "--file-gib", "0.01", "--file-layers", "2"}) {
      arguments.emplace_back(more);
    }
    arguments.insert(arguments.end(), {"--directory", path("")});
    return run("sqz-bench", arguments);
  }
};

TEST_F(BenchTool, EveryCaseHasRows) {
  const ToolRun result = bench({"attend", "prefill", "bandwidth", "open", "verify", "kmeans",
                                "--queries", "20", "--block", "8", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const Json last = result.last();
  EXPECT_EQ(last["machine"]["threads"], 2);
  EXPECT_NE(last["machine"]["isa"], "");
  ASSERT_EQ(last["cases"].size(), 6u);
  size_t rows = 0;
  for (const Json& one : last["cases"]) {
    EXPECT_EQ(one["rounds"], 2);
    for (const Json& row : one["rows"]) {
      ++rows;
      const Json& seconds = row["seconds"];
      EXPECT_GT(seconds["min"], 0.0) << row;
      EXPECT_LE(seconds["min"], seconds["median"]) << row;
      EXPECT_LE(seconds["median"], seconds["p90"]) << row;
      for (const auto& baseline : one["baselines"]) {
        const double times = row["times_faster"][baseline.get<std::string>()];
        EXPECT_GT(times, 0.0) << row;
        if (row["name"] == baseline) {
          EXPECT_EQ(times, 1.0);
        }
      }
    }
  }
  EXPECT_EQ(result.events().size(), rows + 1);
  EXPECT_EQ(files(), "");  // nothing is left
}

TEST_F(BenchTool, SparseRowsSayWhatWasRead) {
  const ToolRun result = bench({"attend", "--sparsity", "0.75", "--no-torch", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const Json rows = result.last()["cases"][0]["rows"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[1]["name"], "dense");
  for (const size_t sparse : {2, 3}) {
    EXPECT_NEAR(rows[sparse]["keep"], 0.25, 0.02) << rows[sparse];
    EXPECT_GT(rows[sparse]["keys_per_run"], 1.0);
  }
  // The tree scores fewer centroids.
  EXPECT_LT(rows[3]["budget"].get<double>() - rows[3]["keep"].get<double>(),
            rows[2]["budget"].get<double>() - rows[2]["keep"].get<double>());
}

TEST_F(BenchTool, OneRowForEachCombination) {
  const ToolRun result = bench({"prefill", "--sparsity", "0.75,0.9", "--block", "8,0", "--queries",
                                "20", "--no-torch", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const Json rows = result.last()["cases"][0]["rows"];
  std::vector<std::string> names;
  for (const Json& row : rows) names.push_back(row["name"]);
  EXPECT_THAT(names,
              ElementsAre("dense", "75 % sparse, 1 level, blocks of 8",
                          "75 % sparse, 2 levels, blocks of 8", "90 % sparse, 1 level, blocks of 8",
                          "90 % sparse, 2 levels, blocks of 8", "75 % sparse, 1 level, one block",
                          "75 % sparse, 2 levels, one block", "90 % sparse, 1 level, one block",
                          "90 % sparse, 2 levels, one block"));
  EXPECT_NEAR(rows[1]["keep"], 0.25, 0.02);
  EXPECT_EQ(rows[1]["selections"], 3.0);  // of 8, 8 and 4 tokens
  EXPECT_EQ(rows[5]["selections"], 1.0);
  EXPECT_NEAR(rows[7]["keep"], 0.1, 0.02);
}

// Requests of one token each choose for themselves; an index that was saved serves as it did.
TEST_F(BenchTool, RequestsAndSavedIndexes) {
  const auto attend = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"attend", "--no-torch", "--json", "--requests", "3"});
    const ToolRun result = bench(std::move(more));
    EXPECT_EQ(result.code, 0) << result.err;
    return result.last()["cases"][0];
  };
  const Json made = attend({"--save-index", path("kept.sqz")});
  EXPECT_EQ(made["shape"]["requests"], 3);
  EXPECT_EQ(made["shape"]["keys"], "made up");
  const Json again = attend({"--index", path("kept.sqz")});
  EXPECT_EQ(again["shape"]["keys"], path("kept.sqz"));
  ASSERT_EQ(again["rows"].size(), made["rows"].size());
  for (const size_t row : {2, 3}) {
    for (const char* field : {"keep", "budget", "keys_per_run"}) {
      EXPECT_EQ(again["rows"][row][field], made["rows"][row][field]) << row << field;
    }
  }
}

TEST_F(BenchTool, BucketsOfAQueryClassifier) {
  const ToolRun made =
      bench({"attend", "--selector", "saap", "--buckets", "40", "--hidden", "24", "--sparsity",
             "0.75,0.9", "--save-index", path("b.sqz"), "--no-torch", "--json"});
  ASSERT_EQ(made.code, 0) << made.err;
  const Json result = made.last()["cases"][0];
  EXPECT_EQ(result["shape"]["selector"], "saap");
  EXPECT_EQ(result["shape"]["buckets"], 40);
  EXPECT_EQ(result["shape"]["hidden"], 24);
  const Json rows = result["rows"];
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[2]["name"], "75 % sparse, saap");
  EXPECT_NEAR(rows[2]["keep"], 0.25, 0.03);
  EXPECT_NEAR(rows[3]["keep"], 0.1, 0.03);
  const ToolRun again = bench({"attend", "--selector", "saap", "--index", path("b.sqz"),
                               "--sparsity", "0.75", "--no-torch", "--json"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.last()["cases"][0]["rows"][2]["keep"], rows[2]["keep"]);
  const ToolRun other = bench({"attend", "--index", path("b.sqz")});
  EXPECT_NE(other.code, 0);
  EXPECT_THAT(other.err,
              HasSubstr("layer 0: found 0 levels of clusters, expected 2 or more (--levels)"));
}

TEST_F(BenchTool, PromptsFromPagesAndBuckets) {
  for (const std::string selector : {"quest", "saap"}) {
    const ToolRun made =
        bench({"prefill", "--selector", selector, "--queries", "20", "--block", "8,0", "--sparsity",
               "0.8", "--save-index", path(selector + ".sqz"), "--no-torch", "--json"});
    ASSERT_EQ(made.code, 0) << made.err;
    const Json result = made.last()["cases"][0];
    EXPECT_EQ(result["shape"]["selector"], selector);
    EXPECT_EQ(result["shape"]["pages"] > 0, selector == "quest");
    const Json rows = result["rows"];
    ASSERT_EQ(rows.size(), 3u);
    EXPECT_EQ(rows[1]["name"], "80 % sparse, " + selector + ", blocks of 8");
    EXPECT_EQ(rows[2]["name"], "80 % sparse, " + selector + ", one block");
    for (const size_t row : {1, 2}) EXPECT_NEAR(rows[row]["keep"], 0.2, 0.03);
    const ToolRun other = bench({"prefill", "--index", path(selector + ".sqz")});
    EXPECT_THAT(other.err,
                HasSubstr("layer 0: found 0 levels of clusters, expected 2 or more (--levels)"));
  }
  const ToolRun other = bench({"attend", "--selector", "quest", "--index", path("saap.sqz")});
  EXPECT_THAT(other.err, HasSubstr("layer 0: found no pages"));
}

TEST_F(BenchTool, TableAndList) {
  const ToolRun table = bench({"open"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("median ms"));
  EXPECT_THAT(table.out, HasSubstr("processor"));
  const ToolRun list = bench({"--list"});
  EXPECT_EQ(list.code, 0);
  for (const char* name :
       {"attend", "prefill", "bandwidth", "open", "verify", "kmeans", "upload"}) {
    EXPECT_THAT(list.out, HasSubstr(name));
  }
}

// 2 layers of 2 KV heads, 5000 tokens: as many problems as heads, of the tokens that were asked
// for.
TEST_F(BenchTool, CapturedKeys) {
  CaptureInfo info;
  info.model = testing::tiny_model(2, 4, 2, 16);
  info.tokens.assign(5000, 1);
  info.query_positions = {4999};
  auto writer = CaptureWriter::create(path("a.h5"), true, info).value();
  for (int64_t layer = 0; layer < 2; ++layer) {
    CapturedLayer data;
    for (int64_t i = 0; i < 2 * 5000 * 16; ++i) {
      data.keys.push_back(static_cast<float>(i * (layer + 3) * 7919 % 1009) - 500.0f);
    }
    data.values = data.keys;
    data.queries.assign(4 * 16, 1.0f);
    ASSERT_TRUE(writer->write_layer(layer, data).ok());
  }
  ASSERT_TRUE(writer->commit().ok());
  for (const auto& [heads, expected] : {std::pair("0", 4), std::pair("6", 6)}) {
    const ToolRun result = bench({"kmeans", "--capture", path("a.h5"), "--kmeans-heads", heads,
                                  "--kmeans-engine", "faiss", "--json"});
    ASSERT_EQ(result.code, 0) << result.err;
    const Json shape = result.last()["cases"][0]["shape"];
    EXPECT_EQ(shape["heads"], expected);
    EXPECT_EQ(shape["points"], 4000);
    EXPECT_EQ(shape["head_dim"], 16);
    EXPECT_EQ(shape["clusters"], 200);
    EXPECT_EQ(shape["keys"], path("a.h5"));
  }
  // The query position is one, which is to calibrate and to ask.
  const ToolRun attend = bench({"attend", "--capture", path("a.h5"), "--no-torch"});
  EXPECT_EQ(attend.code, 2) << attend.err;
  EXPECT_THAT(attend.err, HasSubstr("--capture: found 1, expected at least 2 query positions"));
}

TEST_F(BenchTool, BadInput) {
  const auto expect = [&](std::vector<std::string> more, int code, const std::string& message) {
    const ToolRun result = bench(std::move(more));
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(result.out, "");
  };
  expect({}, 2, "CASE: found none, expected attend");
  expect({"juggle"}, 2, "CASE: found juggle, expected attend");
  expect({"attend", "--sparsity", "1.5"}, 2, "--sparsity");
  expect({"attend", "--levels", "3"}, 2, "--levels");
  expect({"attend", "--level-fractions", "0.05"}, 2, "--level-fractions: found 1, expected two");
  for (const char* fractions : {"0.05,0.01", "0.05,0.05"}) {
    expect({"attend", "--level-fractions", fractions}, 2,
           concat("--level-fractions: found ", fractions, ", expected the coarse level first"));
  }
  expect({"attend", "--isa", "mmx"}, 2, "--isa");
  expect({"open", "--selector", "saap"}, 2, "--selector: found saap, expected squeezed");
  expect({"attend", "--selector", "saap", "--buckets", "9999"}, 2,
         "--buckets: found 9999, expected at most the 3884 clustered keys");
  for (const char* selector : {"saap", "quest"}) {
    expect({"attend", "--selector", selector, "--rows", "q8"}, 2,
           concat("--selector: found ", selector, ", expected squeezed"));
    expect({"attend", "--selector", selector, "--key-codes", "1"}, 2,
           concat("--selector: found ", selector, ", expected squeezed"));
  }
  expect({"attend", "--device", "cuda:all"}, 2, "--device: found cuda:all, expected one");
  expect({"verify", "--device", "cuda"}, 2, "attend, prefill, kmeans and upload run on a GPU");
  expect({"upload"}, 2, "--device: found cpu, expected cuda");
  expect({"attend", "--device", "cuda:99"}, 2, "--device: ");
  expect({"kmeans", "--device", "cuda:99"}, 2, "--device: ");  // not in this build, or no such GPU
  for (const char* engine : {"cuda", "faiss-gpu"}) {           // unless this machine has them
    const ToolRun result = bench({"kmeans", "--kmeans-engine", engine});
    EXPECT_TRUE(result.code == 0 || result.code == 2) << result.err;
    if (result.code != 0) {
      EXPECT_THAT(result.err, HasSubstr(concat("engine ", engine, ": ")));
    }
  }
  expect({"kmeans", "--capture", path("none.h5")}, 3, "none.h5");
  expect({"attend", "--index", path("none.sqz")}, 3, "none.sqz");
  std::ofstream(path("text.h5")) << "no capture";
  expect({"open", "--capture", path("text.h5")}, 2, "attend, prefill and kmeans alone");
  expect({"open", "--index", path("text.h5")}, 2, "it is for attend or prefill alone");
  expect({"attend", "prefill", "--save-index", path("a.sqz")}, 2, "for attend or prefill alone");
  expect({"attend", "--save-index", path("a.sqz"), "--index", path("text.h5")}, 2,
         "nothing beside --index");
  for (const char* rows : {"bf16", "q8"}) {  // what is there stays
    expect({"attend", "--no-torch", "--rows", rows, "--save-index", path("text.h5")}, 1,
           "text.h5 exists; give another name, or remove it first");
    EXPECT_EQ(read_all(path("text.h5")), "no capture");
  }
  expect({"attend", "--save-index", path("none/a.sqz")}, 2, "does not exist; create it first");
  expect({"attend", "--index", path("text.h5")}, 3, "text.h5");
  expect({"attend", "--block", "-1"}, 2, "--block");
  expect({"kmeans", "--capture", path("text.h5")}, 3, "text.h5");
  const ToolRun heads = run("sqz-bench", {"attend", "--heads", "7", "--kv-heads", "2"});
  EXPECT_EQ(heads.code, 2);
  EXPECT_THAT(heads.err, HasSubstr("--heads: found 7, expected a multiple of --kv-heads 2"));
  const ToolRun memory = run("sqz-bench", {"bandwidth", "--tokens", "2147483648", "--kv-heads",
                                           "1024", "--heads", "1024", "--head-dim", "1024"});
  EXPECT_EQ(memory.code, 1);
  EXPECT_THAT(memory.err, HasSubstr("not enough memory; use fewer tokens or a larger machine"));
  const ToolRun folder = run("sqz-bench", {"open", "--directory", path("none")});
  EXPECT_EQ(folder.code, 2);
  EXPECT_THAT(folder.err, HasSubstr("--directory"));
}

// Prompts so long that no round ends in the time that a stop may take.
TEST_F(BenchTool, StoppedItSaysSoAndLeavesNoIndex) {
  const ToolRun stopped =
      run("sqz-bench",
          {"prefill", "--tokens", "20000", "--queries", "16384", "--heads", "8", "--kv-heads", "1",
           "--head-dim", "64", "--threads", "1", "--no-torch", "--json", "--directory", path("")},
          "", {}, [&](pid_t child) {
            signal_when(child, SIGTERM, [&] { return files().find("sqz-bench") != files().npos; });
          });
  EXPECT_EQ(stopped.code, 143) << stopped.err;
  EXPECT_EQ(stopped.last("error")["message"], "stopped by a signal");
  EXPECT_EQ(files(), "");
}

}  // namespace
}  // namespace sqz
