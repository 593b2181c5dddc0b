// sqz-train-qmodel from end to end, with the example model in a setting that takes seconds.
#include <gmock/gmock.h>

#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

class TrainQmodelTool : public ToolTest {
 protected:
  void SetUp() override {
    const std::string book = read_file(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
    write_file(path("train.txt"), book.substr(3000, 24000));
    write_file(path("other.txt"), book.substr(400000, 6000));
  }
  // The command, with values that are small where `more` has none.
  static std::string train(const std::string& more) {
    std::string out = "sqz-train-qmodel -m $MODEL train.txt " + more;
    for (const auto& [option, value] : {std::pair("--buckets", "16"),
                                        {"--hidden", "32"},
                                        {"--window", "512"},
                                        {"--recent", "64"},
                                        {"--positions", "128"},
                                        {"--queries", "64"},
                                        {"--batch", "64"},
                                        {"--keys", "32"},
                                        {"--steps", "40"},
                                        {"--lr", "3e-3"}}) {
      if (out.find(option) == std::string::npos) out += concat(" ", option, " ", value);
    }
    return out;
  }
};

TEST_F(TrainQmodelTool, WritesWhatItSaysAndOtherToolsServeIt) {
  const Json result = expect({train("--checks 2 --test other.txt -o q.sqz")});
  EXPECT_EQ(result["bytes"], std::filesystem::file_size(path("q.sqz")));
  EXPECT_EQ(result["steps"], 40);
  EXPECT_EQ(result["buckets"], 16);
  EXPECT_EQ(result["hidden"], 32);
  EXPECT_EQ(result["recent"], 64);
  EXPECT_EQ(result["dense"], Json::array({0}));
  ASSERT_EQ(result["scores"].size(), 4u);
  EXPECT_EQ(result["scores"][0]["method"], "classifier");
  EXPECT_EQ(result["scores"][0]["recall"], result["recall"]);
  EXPECT_EQ(result["scores"][1]["method"], "kmeans");
  EXPECT_NE(result["scores"][1]["recall"], result["recall"]);
  EXPECT_EQ(files(), "other.txt\nq.sqz\ntrain.txt\n");

  const Json info = expect({"sqz-index info q.sqz"});
  EXPECT_EQ(info["kind"], "qmodel");
  EXPECT_EQ(info["producer"], result["producer"]);
  EXPECT_EQ(info["recall"], result["recall"]);
  EXPECT_EQ(info["fingerprint"], result["fingerprint"]);
  expect_all({{"sqz-index verify q.sqz"},
              {"sqz-index build -m $MODEL other.txt --qmodel q.sqz --tail 64 -o x.sqz"},
              {"sqz-index verify x.sqz"}});
  EXPECT_EQ(expect({"sqz-index info x.sqz"})["partition"], "buckets");
  const Json answer =
      expect({"sqz-generate -m $MODEL -i x.sqz -p 'The Count' --budget 0.5 --max-tokens 4"});
  EXPECT_FALSE(answer["dense_fallback"]);
  EXPECT_NEAR(answer["keep"]["delivered"], answer["keep"]["asked"], 0.1);
  const Json rows =
      expect({"sqz-eval -m $MODEL --text train.txt --tokens 2000 --task recall --trials 2 "
              "--continuation 128 --budget 0.3 --selector saap --qmodel q.sqz --block 64"})["rows"];
  EXPECT_EQ(rows.size(), 2u);
  for (const Json& row : rows) {
    EXPECT_NEAR(row["keep"]["delivered"].get<double>(), row["keep"]["asked"].get<double>(), 0.05);
    EXPECT_GT(row["value"], 0.3) << "more than keys by chance";
    EXPECT_LT(row["value"], 1);
  }

  std::string bytes = read_file(path("q.sqz"));
  bytes[bytes.size() - 5000] = static_cast<char>(bytes[bytes.size() - 5000] ^ 4);
  write_file(path("q.sqz"), bytes);
  EXPECT_EQ(run("sqz-index", {"verify", path("q.sqz")}).code, 3);
}

TEST_F(TrainQmodelTool, RefusesBeforeItWrites) {
  const std::string before = files(), text = read_file(path("other.txt"));
  expect_all({{train("-o bad.sqz --buckets 1024"), 3, {"expected at least 32768 for 1024 buckets"}},
              {train("-o bad.sqz --buckets 1"), 2, {"--buckets: expected 2 to "}},
              {train("-o bad.sqz --batch 1"), 2, {"--batch: expected 2 to "}},
              {train("-o bad.sqz --lr 2"), 2, {"--lr: expected 1e-12 to 1, found 2"}},
              {train("-o bad.sqz --keys 31"), 2, {"--keys: expected 32 to "}},
              {train("-o bad.sqz --window 0"), 2, {"--window: expected 1 to "}},
              {train("-o bad.sqz --memory 0"), 2, {"--memory: Value 0 not in range"}},
              {train("-o bad.sqz --memory 99999999999999999999"), 2, {"--memory"}},
              {train("-o bad.sqz --decay linear"), 2, {"--decay"}},
              {train("-o bad.sqz --dense 0,7"), 2, {"dense: found 7"}},
              {train("--force -o train.txt"), 2, {"train.txt"}},
              {train("--test other.txt --force -o other.txt"), 2, {"other.txt"}}});
  EXPECT_EQ(files(), before);
  EXPECT_EQ(read_file(path("other.txt")), text);
}

}  // namespace
}  // namespace sqz
