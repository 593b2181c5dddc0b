// sqz-index without a model: everything that a capture file is enough for, and what it refuses.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cmath>

#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class IndexToolTest : public ToolTest {
 protected:
  void SetUp() override { write_small_capture(path("c.h5"), 600, 120); }
  // The result of a build of c.h5 to `name`, which is replaced.
  Json build(const std::string& name, const std::string& more = "") const {
    return expect({concat("sqz-index build --capture c.h5 --force -o ", name, " ", more)});
  }
  Json info(const std::string& name) const { return expect({"sqz-index info " + name}); }
};

TEST_F(IndexToolTest, RefusesWhatItCannotDo) {
  write_file(path("m.gguf"), std::string("GGUF\3\0\0\0\0\0\0\0\0\0\0\0", 16));
  write_file(path("a.txt"), "text");
  write_file(path("text.h5"), "not HDF5");
  write_small_capture(path("few.h5"), 600, 60);
  write_small_capture(path("short.h5"), 110, 105);
  write_small_capture(path("nan.h5"), 600, 120, [](CaptureInfo&, CapturedLayer& layer) {
    if (!layer.keys.empty()) layer.keys[1234] = std::nanf("");
  });
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const std::string build = "sqz-index build -o y.sqz ", from = build + "--capture c.h5 ";
  const std::string before = files();
  expect_all({
      {build + "--nonsense", 2, {"--nonsense"}},
      {build, 2, {"no fixed context was given"}},
      {"sqz-index build --capture c.h5", 2, {"--output"}},
      {build + "a.txt", 2, {"no model was given"}},
      {build + "a.txt --tokens b.ids -m m", 2, {"--tokens", "TEXT"}},
      {from + "--tail 9999999999999999999", 2, {"--tail: expected 1 to 2147483648"}},
      {from + "--threads -1", 2, {"--threads"}},
      {from + "--partition tiles", 2, {"--partition"}},
      {from + "--partition pages --page-size 0", 2, {"--page-size"}},
      {from + "--rows q4", 2, {"--rows"}},
      {from + "--level-fractions 0.05,0.01", 2, {"clusters per token: found 0.01"}},
      // Options that would not be used.
      {from + "--model m", 2, {"--model"}},
      {from + "--run-dtype f32", 2, {"--run-dtype"}},
      {from + "--shard 0/2", 2, {"--shard requires --manifest"}},
      {from + "--page-size 16", 2, {"--page-size requires --partition"}},
      {from + "--levels 2 --level-fractions 0.01", 2, {"--levels", "--level-fractions"}},
      {from + "--partition pages --page-size 16 --engine faiss", 2, {"--engine"}},
      {from + "--qmodel q.sqz --levels 2", 2, {"--qmodel", "--levels"}},
      // Files of other kinds, and outputs.
      {"sqz-index info m.gguf", 3, {"a GGUF file"}},
      {"sqz-index info none.sqz", 3, {"none.sqz"}},
      {"sqz-index info pipe", 2, {"not a regular file"}},
      {"sqz-index verify c.h5", 3, {"c.h5"}},
      {"sqz-index compress c.h5 -o y.sqz", 3, {"c.h5"}},
      {build + "a.txt -m m.gguf", 3, {"m.gguf: is a file", "no GGUF is read"}},
      {build + "a.txt -m a.txt", 3, {"a.txt: is a file, expected a Hugging Face model folder"}},
      {build + "a.txt -m meta-llama/Llama-3.1-8B", 3, {"no such folder", "hf download"}},
      {"sqz-index build --capture c.h5 -o no/x.sqz", 2, {"there is no folder"}},
      {"sqz-index build --capture c.h5 -o .", 2, {"is a folder"}},
      {"sqz-index build --capture c.h5 -o /proc/x.sqz", 1, {"/proc/x.sqz"}},
      {"sqz-index build --capture c.h5 -o c.h5 --force", 2, {"is an input"}},
      {"sqz-index build --capture c.h5 -o text.h5", 1, {"--force"}},
      // Captures.
      {build + "--capture none.h5", 3, {"none.h5"}},
      {build + "--capture pipe", 2, {"not a regular file"}},
      {build + "--capture text.h5", 3, {"not a readable HDF5 file"}},
      {build + "--capture few.h5", 3, {"the positions 500 to 599"}},
      {build + "--capture short.h5", 2, {"110"}},
      {build + "--capture nan.h5", 3, {"nan.h5", "layer 0"}},
#ifndef SQZ_WITH_TRAINING
      {build + "a.txt -m $MODEL --tail 1 --sink 0", 3, {"-DSQZ_TRAINING=ON"}},
#endif
  });
  EXPECT_EQ(files(), before);
  EXPECT_EQ(read_file(path("text.h5")), "not HDF5");
}

// Options, some of the result, and some of what the index says. --dry-run knows the size before.
TEST_F(IndexToolTest, BuildsFromACapture) {
  const struct {
    const char* options;
    Json result, index;
  } cases[] = {
      {"--engine faiss --seed 7",
       {{"tokens", 600}, {"clustered", 484}, {"clusters", {6, 30}}, {"engine", "faiss"}},
       {{"sink", 16}, {"tail", 100}, {"levels", 2}, {"dtype", "BF16"}, {"partition", "kmeans"}}},
      {"--levels 1 --rows f16 --tail 40 --sink 8",
       {{"clustered", 552}, {"clusters", Json::array({30})}},
       {{"sink", 8}, {"tail", 40}, {"levels", 1}, {"dtype", "F16"}}},
      {"--level-fractions 0.02,0.1", {{"clusters", {12, 60}}}, {{"levels", 2}}},
      {"--partition pages --page-size 32",  // 484 tokens: 15 whole pages and one of 4
       {{"clusters", Json::array()}, {"pages", 16}, {"engine", "none"}},
       {{"partition", "pages"}, {"page_size", 32}}},
      {"--rows q8", {{"clustered", 484}}, {{"rows", "q8"}}},
  };
  for (const auto& [options, result, index] : cases) {
    SCOPED_TRACE(options);
    fs::remove(path("x.sqz"));
    const Json plan = build("x.sqz", concat(options, " --dry-run"));
    EXPECT_FALSE(fs::exists(path("x.sqz")));
    EXPECT_GT(plan["peak_memory"], 0);
    const Json built = build("x.sqz", options);
    for (const auto& [key, value] : result.items()) EXPECT_EQ(built[key], value) << key;
    EXPECT_EQ(built["bytes"], fs::file_size(path("x.sqz")));
    for (const char* key : {"bytes", "tokens", "clusters", "pages"}) {
      EXPECT_EQ(plan[key], built[key]) << key;
    }
    const Json said = info("x.sqz");
    for (const auto& [key, value] : index.items()) EXPECT_EQ(said[key], value) << key;
    EXPECT_EQ(said["fingerprint"], built["fingerprint"]);
    EXPECT_EQ(expect({"sqz-index verify x.sqz"})["ok"], true);
  }
  EXPECT_EQ(files(), "c.h5\nx.sqz\n");
  const Json built = expect(
      {"sqz-index build --capture c.h5 -o z.sqz --sink 8 --tail 50 --level-fractions 0.02,0.1",
       0,
       {"seconds.cluster"}});
  EXPECT_EQ(built["clustered"], 600 - 8 - 50);
  EXPECT_EQ(built["clusters"], Json({12, 60}));
}

TEST_F(IndexToolTest, LayersThatAllHaveAWindowSaveNothingAndItIsSaid) {
  write_small_capture(path("w.h5"), 600, 120, [](CaptureInfo& info, CapturedLayer&) {
    info.model.sliding_window = {64, 64};
  });
  const ToolRun built = run("sqz-index", words_of("build --capture w.h5 -o x.sqz"));
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_THAT(built.err, HasSubstr("this index will save nothing"));
}

TEST_F(IndexToolTest, LayersOfEveryKind) {
  int64_t layer = -1;
  write_small_capture(path("c.h5"), 600, 120, [&](CaptureInfo& info, CapturedLayer& data) {
    if (layer < 0) {
      ModelDescription& model = info.model;
      model.layers = 4;
      model.sliding_window = {0, 64, 0, 0};
      std::vector<LayerGeometry> layers;
      for (int64_t l = 0; l < model.layers; ++l) layers.push_back(model.layer(l));
      layers[2].kind = LayerKind::kState;
      layers[3].kind = LayerKind::kShared;
      layers[3].of = 0;
      model.geometry = layers;
      info.state.resize(4);
      info.state[2] = {{"conv", DType::kF32, {2, 3}}};
    } else if (layer == 2) {
      data.state = {std::vector<std::byte>(24, std::byte{1})};
    }
    ++layer;
  });
  build("x.sqz");
  expect({"sqz-index compress x.sqz -o q8.sqz --rows q8"});
  expect({"sqz-index prune x.sqz -o p.sqz --selector stream --budget 0.5"});
  for (const char* name : {"x.sqz", "q8.sqz", "p.sqz"}) {
    EXPECT_EQ(expect({concat("sqz-index verify ", name)})["ok"], true);
    const Json layers = info(name)["layers"];
    std::string kinds;
    for (const Json& one : layers) kinds += one["kind"].get<std::string>() + " ";
    EXPECT_EQ(kinds, "full recent state shared ");
    EXPECT_EQ(layers[2]["state"], Json({"conv"}));
  }
}

TEST_F(IndexToolTest, CompressWritesTheBytesOfABuild) {
  build("x.sqz");
  for (const char* options : {"--rows q8 --layers16 0", "--rows q8"}) {
    build("y.sqz", options);
    const Json compressed = expect({concat("sqz-index compress x.sqz -o z.sqz --force ", options)});
    EXPECT_EQ(compressed["bytes"], fs::file_size(path("z.sqz")));
    EXPECT_TRUE(read_file(path("y.sqz")) == read_file(path("z.sqz")));
  }
  EXPECT_EQ(info("z.sqz")["rows"], "q8");
}

TEST_F(IndexToolTest, VerifyFindsDamage) {
  build("x.sqz");
  const std::string whole = read_file(path("x.sqz"));
  std::string bytes = whole;
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  write_file(path("x.sqz"), bytes);
  EXPECT_EQ(expect({"sqz-index verify x.sqz", 3, {"XXH3-64"}})["code"], "corrupt file");
  write_file(path("x.sqz"), whole.substr(0, whole.size() - 1));
  EXPECT_EQ(expect({"sqz-index info x.sqz", 3})["code"], "corrupt file");
}

TEST_F(IndexToolTest, AFullOrClosedStandardOutputIsAnError) {
  build("x.sqz");
  for (const char* command : {"info x.sqz", "info --json x.sqz", "--help", "--version"}) {
    for (const char* stdout_is : {" > /dev/full", " >&-"}) {
      const ToolRun full = run("/bin/sh", {"-c", concat(SQZ_INDEX_TOOL " ", command, stdout_is)});
      EXPECT_EQ(full.code, 1) << command << stdout_is;
      EXPECT_THAT(full.err, HasSubstr("standard output")) << command << stdout_is;
    }
  }
}

TEST_F(IndexToolTest, MoreQueriesThanTheTailBuildTheSameIndex) {
  build("x.sqz");
  // The same capture, cut to the queries of the tail.
  auto reader = CaptureReader::open(path("c.h5")).value();
  CaptureInfo cut = reader->info();
  cut.query_positions.erase(cut.query_positions.begin(), cut.query_positions.begin() + 20);
  testing::write_capture(path("tail.h5"), cut, [&](int64_t layer) {
    CapturedLayer data = reader->read_layer(layer).value();
    std::vector<float> queries;
    const auto d = cut.model.head_dim;
    for (int64_t head = 0; head < cut.model.query_heads; ++head) {
      const auto begin = data.queries.begin() + head * 120 * d;
      queries.insert(queries.end(), begin + 20 * d, begin + 120 * d);
    }
    data.queries = queries;
    return data;
  });
  expect({"sqz-index build --capture tail.h5 -o y.sqz"});
  EXPECT_TRUE(read_file(path("x.sqz")) == read_file(path("y.sqz")));
}

// A signal ends a build at once, with the right code and without a trace.
TEST_F(IndexToolTest, SignalsStopABuildAndLeaveNothing) {
  write_small_capture(path("c.h5"), 4000, 120);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGKILL}) {
    const ToolRun stopped =
        run("sqz-index",
            words_of("build --capture c.h5 -o x.sqz --iterations 100 --level-fractions 0.3 "
                     "--progress"),
            "", {}, [&](pid_t child) { signal_when(child, signal, [&] { return has_spoken(); }); });
    EXPECT_EQ(stopped.code, 128 + signal) << stopped.err;
    EXPECT_EQ(files(), "c.h5\n");
  }
}

}  // namespace
}  // namespace sqz
