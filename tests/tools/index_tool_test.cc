// sqz-index without a model: everything that a capture file is enough for, and what it refuses.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cmath>

#include "tests/formats/raw_safetensors.h"
#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

const std::string kTool = "sqz-index";

class IndexToolTest : public ToolTest {
 protected:
  std::string capture(int64_t tokens = 600, int64_t queries = 120,
                      const CaptureChange& change = {}) {
    write_small_capture(path("capture.h5"), tokens, queries, change);
    return path("capture.h5");
  }

  std::string built(const std::string& name) {
    EXPECT_EQ(run(kTool, {"build", "--capture", capture(), "-o", path(name)}).code, 0);
    return path(name);
  }

  // `arguments` are refused with this code and a message with `part`; the folder is as it was.
  void expect_refused(const std::vector<std::string>& arguments, int code,
                      const std::string& part) {
    const std::string before = files();
    const ToolRun refused = run(kTool, arguments);
    EXPECT_EQ(refused.code, code) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(part));
    EXPECT_EQ(refused.out, "");
    EXPECT_EQ(files(), before);
  }
};

TEST_F(IndexToolTest, HelpAndVersion) {
  const ToolRun version = run(kTool, {"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out, "sqz-index " SQZ_VERSION "\n");
  const ToolRun help = run(kTool, {"--help"});
  EXPECT_EQ(help.code, 0);
  for (const char* part : {"build", "capture", "info", "verify", "Examples:", "Exit codes: 0 ok"}) {
    EXPECT_THAT(help.out, HasSubstr(part));
  }
  for (const char* command :
       {"append", "build", "capture", "compress", "info", "prune", "verify"}) {
    const ToolRun sub = run(kTool, {command, "--help"});
    EXPECT_EQ(sub.code, 0) << command;
    for (const char* part : {"Example", "Exit codes:", "--json", "--no-progress"}) {
      EXPECT_THAT(sub.out, HasSubstr(part)) << command;
    }
  }
}

TEST_F(IndexToolTest, UsageErrorsExitWithTwo) {
  expect_refused({}, 2, "subcommand is required");
  expect_refused({"bilud"}, 2, "--help");
  expect_refused({"bilud"}, 2, "no command bilud; expected append, build,");
  expect_refused({"build", "--max-tokens", "0"}, 2, "expected 1 to 2147483648, found 0");
  expect_refused({"build", "--tail", "9999999999999999999"}, 2, "expected 1 to 2147483648");
  expect_refused({"build", "--nonsense", "-o", path("x.sqz")}, 2, "--nonsense");
  expect_refused({"build", "-o", path("x.sqz")}, 2, "no fixed context was given");
  expect_refused({"build", "--capture", capture()}, 2, "--output");
  expect_refused({"build", "a.txt", "-o", path("x.sqz")}, 2, "no model was given");
  expect_refused({"build", "a.txt", "--tokens", "b.npy", "--model", "m", "-o", path("x.sqz")}, 2,
                 "pass one of them");
  expect_refused({"build", "--capture", "c.h5", "--model", "m", "-o", path("x.sqz")}, 2,
                 "--capture brings");
  // What would not be used.
  const auto unused = [&](std::vector<std::string> more, const std::string& part) {
    more.insert(more.begin(), {"build", "--capture", capture(), "-o", path("x.sqz")});
    expect_refused(more, 2, part);
  };
  unused({"--device", "cuda:all"}, "--device cuda:all is for a corpus: pass --manifest F.jsonl");
  unused({"--run-dtype", "f32"}, "--run-dtype excludes --capture");
  unused({"--answer-tokens", "8"}, "--answer-tokens requires --calibrate-with");
  unused({"--levels", "2", "--level-fractions", "0.01,0.05"}, "--level-fractions excludes --levels");
  for (const auto& [option, value] : {std::pair("--levels", "2"),
                                      {"--level-fractions", "0.05"},
                                      {"--coarse-keep", "0.5"},
                                      {"--iterations", "10"},
                                      {"--engine", "faiss"}}) {
    unused({"--page-size", "16", option, value}, option);
    unused({"--qmodel", "q.sqz", option, value}, option);
  }
  expect_refused({"build", "--capture", "c.h5", "--separate", "-o", path("x")}, 2, "--separate");
  expect_refused(
      {"build", "--capture", capture(), "--level-fractions", "0.05,0.01", "-o", path("x.sqz")}, 2,
      "--level-fractions");
  expect_refused({"build", "--capture", capture(), "--threads", "-1", "-o", path("x.sqz")}, 2,
                 "--threads");
}

TEST_F(IndexToolTest, UsageErrorsAreJsonToo) {
  const std::vector<std::vector<std::string>> commands = {{"info", "--json", "--nonsense", "x"},
                                                          {"info", "--nonsense", "x", "--json"},
                                                          {"info", "--threads", "x", "--json"},
                                                          {"bilud", "--json"},
                                                          {"build", "--json"}};
  for (const auto& command : commands) {
    const ToolRun refused = run(kTool, command);
    EXPECT_EQ(refused.code, 2);
    EXPECT_EQ(refused.last("error")["code"], "invalid argument");
    EXPECT_THAT(refused.err, HasSubstr(std::string(refused.last("error")["message"])));
    EXPECT_EQ(refused.events().size(), 1u);
  }
}

TEST_F(IndexToolTest, FilesOfOtherKindsAreNamed) {
  write_all(path("m.gguf"), std::string("GGUF\3\0\0\0\0\0\0\0\0\0\0\0", 16));
  write_all(path("a.txt"), "text");
  expect_refused({"info", path("m.gguf")}, 3, "not an index: found a GGUF file");
  const auto build = [&](const std::string& model) -> std::vector<std::string> {
    return {"build", "-m", model, path("a.txt"), "-o", path("x.sqz")};
  };
  expect_refused(build(path("m.gguf")), 3, "a GGUF file, which is not read");
  expect_refused(build(path("a.txt")), 3, "found a file, expected a Hugging Face model folder");
  expect_refused(build("meta-llama/Llama-3.1-8B"), 3,
                 "Nothing is downloaded: get it with `hf download meta-llama/Llama-3.1-8B");
  expect_refused(build("./nowhere"), 3, "./nowhere: no such folder");
}

TEST_F(IndexToolTest, LayersThatAllHaveAWindowSaveNothingAndItIsSaid) {
  const std::string file = capture(600, 120, [](CaptureInfo& info, CapturedLayer&) {
    info.model.sliding_window = {64, 64};
  });
  for (const bool dry : {true, false}) {
    std::vector<std::string> arguments = {"build", "--capture", file, "-o", path("x.sqz")};
    if (dry) arguments.emplace_back("--dry-run");
    const ToolRun built = run(kTool, arguments);
    ASSERT_EQ(built.code, 0) << built.err;
    EXPECT_THAT(built.err, HasSubstr("this index will save nothing"));
    EXPECT_THAT(built.out, HasSubstr("clusters     none: every layer has a sliding window"));
  }
}

TEST_F(IndexToolTest, BuildsFromACapture) {
  const std::string file = capture(), index = path("x.sqz");
  const ToolRun built =
      run(kTool, {"build", "--capture", file, "-o", index, "--json", "--engine", "faiss"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(built.err, "");  // no terminal and a short run: no progress
  const Json result = built.last();
  EXPECT_EQ(result["tokens"], 600);
  EXPECT_EQ(result["clustered"], 600 - 16 - 100);
  EXPECT_EQ(result["clusters"].size(), 2u);
  EXPECT_EQ(result["bytes"], fs::file_size(index));
  EXPECT_EQ(result["engine"], "faiss");
  EXPECT_EQ(result["fingerprint"], fingerprint(small_model()));
  for (const char* part : {"capture", "cluster", "calibrate", "write"}) {
    EXPECT_TRUE(result["seconds"][part].is_number()) << part;
  }
  EXPECT_EQ(files(), "capture.h5\nx.sqz\n");
}

TEST_F(IndexToolTest, BuildsPages) {
  const std::string file = capture(), index = path("x.sqz");
  const ToolRun built = run(kTool, {"build", "--capture", file, "-o", index, "--json",
                                    "--partition", "pages", "--page-size", "32"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(built.last()["pages"], 16);  // 484 tokens: 15 whole ones and one of 4
  EXPECT_EQ(built.last()["clusters"], Json::array());
  const ToolRun info = run(kTool, {"info", index, "--json"});
  ASSERT_EQ(info.code, 0) << info.err;
  EXPECT_EQ(info.last()["partition"], "pages");
  EXPECT_EQ(info.last()["page_size"], 32);
  EXPECT_EQ(info.last()["pages"], 16);
  EXPECT_EQ(info.last()["key_calibration"], false);
  EXPECT_EQ(info.last()["build"]["page_size"], 32);
  EXPECT_THAT(run(kTool, {"info", index}).out, HasSubstr("16 a KV head, of 32 tokens"));
  EXPECT_EQ(run(kTool, {"verify", index}).code, 0);

  const ToolRun keys = run(
      kTool, {"build", "--capture", file, "-o", index, "--json", "--force", "--calibrate-keys"});
  ASSERT_EQ(keys.code, 0) << keys.err;
  EXPECT_EQ(run(kTool, {"info", index, "--json"}).last()["key_calibration"], true);
  expect_refused({"build", "--capture", file, "-o", path("y.sqz"), "--partition", "tiles"}, 2,
                 "--partition");
  expect_refused({"build", "--capture", file, "-o", path("y.sqz"), "--page-size", "0"}, 2,
                 "--page-size");
}

TEST_F(IndexToolTest, CompressWritesTheBytesOfABuild) {
  const std::string file = capture(), whole = path("x.sqz");
  ASSERT_EQ(run(kTool, {"build", "--capture", file, "-o", whole}).code, 0);
  const std::vector<std::vector<std::string>> cases = {
      {"--rows", "q8"},
      {"--rows", "q8", "--key-codes", "1", "--layers16", "0"},
      {"--key-codes", "2"}};
  for (const auto& options : cases) {
    std::vector<std::string> build = {"build", "--capture", file, "-o", path("y.sqz"), "--force"};
    std::vector<std::string> compress = {"compress",    whole,     "-o",
                                         path("z.sqz"), "--force", "--json"};
    build.insert(build.end(), options.begin(), options.end());
    compress.insert(compress.end(), options.begin(), options.end());
    ASSERT_EQ(run(kTool, build).code, 0);
    const ToolRun compressed = run(kTool, compress);
    ASSERT_EQ(compressed.code, 0) << compressed.err;
    EXPECT_EQ(compressed.last()["bytes"], fs::file_size(path("z.sqz")));
    EXPECT_EQ(testing::read_file(path("y.sqz")), testing::read_file(path("z.sqz")));
    EXPECT_EQ(run(kTool, {"verify", path("z.sqz")}).code, 0);
  }
  EXPECT_EQ(run(kTool, {"info", path("z.sqz"), "--json"}).last()["key_codes"], 2);
  expect_refused({"compress", whole, "-o", path("z.sqz"), "--force"}, 2, "nothing to do");
  expect_refused({"compress", whole, "-o", path("z.sqz"), "--force", "--rows", "f16"}, 2,
                 "--rows: found f16, expected bf16");
  expect_refused(
      {"build", "--capture", file, "-o", path("z.sqz"), "--rows", "f16", "--dtype", "bf16"}, 2,
      "--rows: found f16");
}

TEST_F(IndexToolTest, OptionsComeFromTheEnvironmentToo) {
  const std::string index = path("x.sqz");
  const ToolRun built = run(kTool, {"build", "--sink", "8"}, "",
                            {"SQZ_CAPTURE=" + capture(), "SQZ_OUTPUT=" + index, "SQZ_JSON=1",
                             "SQZ_TAIL=50", "SQZ_SINK=9", "SQZ_LEVEL_FRACTIONS=0.02,0.1"});
  ASSERT_EQ(built.code, 0) << built.err;
  EXPECT_EQ(built.last()["clustered"], 600 - 8 - 50);  // the command line wins
  EXPECT_EQ(built.last()["clusters"], Json({12, 60}));
}

TEST_F(IndexToolTest, DryRunTellsTheSizeAndWritesNothing) {
  const std::string file = capture(), index = path("x.sqz");
  for (const std::vector<std::string>& options : std::vector<std::vector<std::string>>{
           {}, {"--levels", "1"}, {"--dtype", "f16", "--tail", "40"}}) {
    std::vector<std::string> arguments = {"build", "--capture", file,     "-o",
                                          index,   "--json",    "--force"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    fs::remove(index);
    std::vector<std::string> dry = arguments;
    dry.push_back("--dry-run");
    const Json plan = run(kTool, dry).last();
    EXPECT_FALSE(fs::exists(index));
    EXPECT_GT(plan["peak_memory"], 0);
    EXPECT_GT(plan["seconds_estimate"], 0);
    EXPECT_GE(plan["gpu_memory"], plan["gpu_memory_least"]);
    EXPECT_TRUE(plan.contains("gpu_memory_least"));
    const Json result = run(kTool, arguments).last();
    EXPECT_EQ(plan["bytes"], fs::file_size(index));
    EXPECT_EQ(plan["clusters"], result["clusters"]);
  }
}

TEST_F(IndexToolTest, InfoAndVerify) {
  const std::string index = path("x.sqz");
  ASSERT_EQ(run(kTool, {"build", "--capture", capture(), "-o", index, "--seed", "7"}).code, 0);
  const Json info = run(kTool, {"info", index, "--json"}).last();
  EXPECT_EQ(info["tokens"], 600);
  EXPECT_EQ(info["sink"], 16);
  EXPECT_EQ(info["tail"], 100);
  EXPECT_EQ(info["levels"], 2);
  EXPECT_EQ(info["dtype"], "BF16");
  EXPECT_EQ(info["model"]["weights_hash"], "0123456789abcdef");
  EXPECT_EQ(info["fingerprint"], fingerprint(small_model()));
  EXPECT_EQ(info["calibration"]["queries"], 100);
  EXPECT_EQ(info["build"]["seed"], 7);
  EXPECT_EQ(info["bytes"], fs::file_size(index));
  const ToolRun table = run(kTool, {"info", index});
  EXPECT_EQ(table.code, 0);
  EXPECT_THAT(table.out, HasSubstr("first 16 and last 100"));

  const Json verified = run(kTool, {"verify", index, "--json"}).last();
  EXPECT_EQ(verified["ok"], true);
  EXPECT_GT(verified["checked"], 10);
  EXPECT_EQ(verified["problems"], Json::array());
}

TEST_F(IndexToolTest, VerifyFindsDamage) {
  const std::string index = path("x.sqz");
  ASSERT_EQ(run(kTool, {"build", "--capture", capture(), "-o", index}).code, 0);
  std::string bytes = read_all(index);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  write_all(index, bytes);
  const ToolRun damaged = run(kTool, {"verify", index, "--json"});
  EXPECT_EQ(damaged.code, 3);
  const Json result = damaged.last();
  EXPECT_EQ(result["ok"], false);
  EXPECT_EQ(result["problems"].size(), 1u);
  EXPECT_THAT(run(kTool, {"verify", index}).out, HasSubstr("damaged"));

  write_all(index, bytes.substr(0, bytes.size() - 1));
  EXPECT_EQ(run(kTool, {"verify", index}).code, 3);
  const ToolRun cut = run(kTool, {"info", index, "--json"});
  EXPECT_EQ(cut.code, 3);
  EXPECT_EQ(cut.last("error")["code"], "corrupt file");
  expect_refused({"info", path("none.sqz")}, 3, "none.sqz");
  expect_refused({"verify", capture()}, 3, "capture.h5");
}

TEST_F(IndexToolTest, AnExistingOutputNeedsForce) {
  const std::string file = capture(), index = path("x.sqz");
  write_all(index, "precious");
  expect_refused({"build", "--capture", file, "-o", index}, 1, "--force");
  EXPECT_EQ(read_all(index), "precious");
  EXPECT_EQ(run(kTool, {"build", "--capture", file, "-o", index, "--force"}).code, 0);
  EXPECT_EQ(run(kTool, {"verify", index}).code, 0);
}

TEST_F(IndexToolTest, OutputsThatCannotBeWritten) {
  const std::string file = capture();
  expect_refused({"build", "--capture", file, "-o", path("no/such/x.sqz")}, 2, "does not exist");
  expect_refused({"build", "--capture", file, "-o", folder_.string()}, 2, "is a folder");
  expect_refused({"build", "--capture", file, "-o", "/proc/x.sqz"}, 3, "/proc/x.sqz");
}

TEST_F(IndexToolTest, AnOutputThatIsAnInputIsKept) {
  const std::string file = capture(), before = read_all(file);
  expect_refused({"build", "--capture", file, "-o", file, "--force"}, 2, "is an input");
  std::filesystem::create_hard_link(file, path("same.h5"));
  expect_refused({"build", "--capture", file, "-o", path("same.h5"), "--force"}, 2, "is an input");
  EXPECT_EQ(read_all(file), before);
}

TEST_F(IndexToolTest, AFullOrClosedStandardOutputIsAnError) {
  const std::string index = built("x.sqz");
  for (const std::string& command : {"info " + index, "info --json " + index, std::string("--help"),
                                     std::string("--version"), "verify " + index}) {
    for (const char* stdout_is : {" > /dev/full", " >&-"}) {
      const ToolRun full = run("/bin/sh", {"-c", concat(SQZ_INDEX_TOOL " ", command, stdout_is)});
      EXPECT_EQ(full.code, 1) << command << stdout_is;
      EXPECT_THAT(full.err, HasSubstr("standard output")) << command << stdout_is;
    }
  }
}

TEST_F(IndexToolTest, EscapesAreShownNotSent) {
  const ToolRun refused = run(kTool, {"info", path("\x1b[31mred\x07")});
  EXPECT_THAT(refused.err, HasSubstr("\\x1b[31mred\\x07"));
  const ToolRun usage = run(kTool, {"\x1b]0;title"});
  EXPECT_THAT(usage.err, HasSubstr("\\x1b]0;title"));
  const std::string index = built("\x1b[2J.sqz");
  const ToolRun shown = run(kTool, {"verify", index});
  EXPECT_THAT(shown.out, HasSubstr("\\x1b[2J.sqz"));
  for (const ToolRun& each : {refused, usage, shown}) {
    EXPECT_EQ((each.out + each.err).find('\x1b'), std::string::npos);
  }
}

TEST_F(IndexToolTest, AKilledBuildLeavesNothing) {
  const ToolRun killed =
      run(kTool,
          {"build", "--capture", capture(4000), "-o", path("x.sqz"), "--iterations", "10000",
           "--level-fractions", "0.3", "--progress"},
          "", {}, [&](pid_t child) { signal_when(child, SIGKILL, [&] { return has_spoken(); }); });
  EXPECT_EQ(killed.code, 128 + SIGKILL);
  EXPECT_EQ(files(), "capture.h5\n");
}

TEST_F(IndexToolTest, GcRemovesWhatKilledBuildsLeft) {
  write_all(path("x.sqz.tmp.7.0"), "of a dead build");
  const ToolRun named = run(kTool, {"gc", path(""), "--dry-run", "--json"});
  EXPECT_EQ(named.last()["files"].size(), 1u) << named.out;
  EXPECT_THAT(files(), HasSubstr("x.sqz.tmp"));
  const ToolRun removed = run(kTool, {"gc", path("")});
  EXPECT_THAT(removed.out, HasSubstr("x.sqz.tmp"));
  EXPECT_EQ(files(), "");
  expect_refused({"gc", path("none")}, 3, "none");
}

// A build that ended after layer 0: the capture's layer 1 was no good.
TEST_F(IndexToolTest, ResumeGoesOnAfterTheLastWholeLayer) {
  const auto spoil = [](CaptureInfo&, CapturedLayer& data) {
    static int layer = 0;
    if (!data.keys.empty() && layer++ == 1) data.keys[0] = NAN;
  };
  const std::string whole = read_all(built("whole.sqz"));
  const std::vector<std::string> build = {"build", "--capture",   path("capture.h5"),
                                          "-o",    path("x.sqz"), "--resume"};
  const auto resumed = [&](int64_t layers, const std::string& engine) {
    std::vector<std::string> arguments = build;
    arguments.emplace_back("--json");
    const ToolRun done = run(kTool, arguments);
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_EQ(done.last()["resumed"], layers);
    EXPECT_EQ(done.last()["engine"], engine);
    EXPECT_EQ(read_all(path("x.sqz")), whole);
    EXPECT_EQ(files(), "capture.h5\nwhole.sqz\nx.sqz\n");
  };
  capture(600, 120, spoil);
  EXPECT_EQ(run(kTool, build).code, 3);
  EXPECT_THAT(files(), HasSubstr("x.sqz.tmp.resume"));
  capture();
  std::vector<std::string> other = build;
  other.insert(other.end(), {"--sink", "8"});
  expect_refused(other, 3, "x.sqz.tmp.resume: sink: found \"16\", expected \"8\"");
  resumed(1, "faiss");
  resumed(2, "none");
  expect_refused(other, 1, "file exists; pass --force");
  other.insert(other.end(), {"--calibrate-with", "p", "--model", "m", "t"});
  other.erase(other.begin() + 1, other.begin() + 3);
  expect_refused(other, 2, "build with --resume alone");

  fs::remove(path("x.sqz"));
  const ToolRun stopped =
      run(kTool,
          {"build", "--capture", capture(4000), "-o", path("x.sqz"), "--resume", "--iterations",
           "100", "--level-fractions", "0.3", "--progress"},
          "", {}, [&](pid_t child) { signal_when(child, SIGTERM, [&] { return has_spoken(); }); });
  EXPECT_EQ(stopped.code, 143);
  EXPECT_EQ(run(kTool, {"gc", path("")}).code, 0);
  EXPECT_EQ(files(), "capture.h5\nwhole.sqz\n");
}

TEST_F(IndexToolTest, PipesAreRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"info", path("pipe")},
        {"build", "--capture", path("pipe"), "-o", path("x.sqz")}}) {
    expect_refused(command, 2, "not a regular file");
  }
}

TEST_F(IndexToolTest, CapturesThatCannotBeBuilt) {
  const std::string out = path("x.sqz");
  expect_refused({"build", "--capture", path("none.h5"), "-o", out}, 3, "none.h5");
  write_all(path("text.h5"), "not HDF5");
  expect_refused({"build", "--capture", path("text.h5"), "-o", out}, 3, "not a readable HDF5 file");
  const auto pre = [](CaptureInfo& info, CapturedLayer&) { info.keys_post_rope = false; };
  expect_refused({"build", "--capture", capture(600, 120, pre), "-o", out}, 3, "before RoPE");
  expect_refused({"build", "--capture", capture(600, 60), "-o", out}, 3, "--queries 100");
  expect_refused({"build", "--capture", capture(110, 105), "-o", out}, 2, "110");
  const auto nan = [](CaptureInfo&, CapturedLayer& layer) {
    if (!layer.keys.empty()) layer.keys[1234] = std::nanf("");
  };
  expect_refused({"build", "--capture", capture(600, 120, nan), "-o", out}, 3, "layer 0");
}

TEST_F(IndexToolTest, MoreQueriesThanTheTailBuildTheSameIndex) {
  const auto build = [&](const std::string& file, const std::string& name) {
    const ToolRun built = run(kTool, {"build", "--capture", file, "-o", path(name)});
    EXPECT_EQ(built.code, 0) << built.err;
    return read_all(path(name));
  };
  const std::string more = build(capture(600, 120), "more.sqz");
  // The same capture, cut to the queries of the tail.
  auto reader = CaptureReader::open(path("capture.h5")).value();
  CaptureInfo info = reader->info();
  info.query_positions.erase(info.query_positions.begin(), info.query_positions.begin() + 20);
  auto writer = CaptureWriter::create(path("tail.h5"), false, info).value();
  for (int64_t layer = 0; layer < info.model.layers; ++layer) {
    CapturedLayer data = reader->read_layer(layer).value();
    std::vector<float> queries;
    const auto d = info.model.head_dim;
    for (int64_t head = 0; head < info.model.query_heads; ++head) {
      const auto begin = data.queries.begin() + head * 120 * d;
      queries.insert(queries.end(), begin + 20 * d, begin + 120 * d);
    }
    data.queries = queries;
    ASSERT_TRUE(writer->write_layer(layer, data).ok());
  }
  ASSERT_TRUE(writer->commit().ok());
  EXPECT_TRUE(build(path("tail.h5"), "tail.sqz") == more);
}

TEST_F(IndexToolTest, ThreadsDoNotChangeTheFile) {
  const std::string file = capture();
  for (const char* threads : {"1", "2"}) {
    ASSERT_EQ(run(kTool, {"build", "--capture", file, "--threads", threads, "-o",
                          path(concat("x", threads))})
                  .code,
              0);
  }
  EXPECT_TRUE(read_all(path("x1")) == read_all(path("x2")));
}

TEST_F(IndexToolTest, ProgressCanBeForced) {
  const ToolRun built =
      run(kTool, {"build", "--capture", capture(), "-o", path("x.sqz"), "--progress"});
  EXPECT_EQ(built.code, 0);
  EXPECT_THAT(built.err, HasSubstr("100 %"));
  const ToolRun silent =
      run(kTool, {"build", "--capture", capture(), "-o", path("y.sqz"), "--no-progress"});
  EXPECT_THAT(silent.err, Not(HasSubstr("%")));
}

// A long clustering is interrupted: it ends soon, with the right code and without a trace.
TEST_F(IndexToolTest, SignalsStopABuildAndLeaveNothing) {
  const std::string file = capture(4000);
  for (const auto& [signal, code] :
       {std::pair{SIGINT, 130}, std::pair{SIGTERM, 143}, std::pair{SIGHUP, 129}}) {
    const ToolRun stopped = run(kTool,
                                {"build", "--capture", file, "-o", path("x.sqz"), "--iterations",
                                 "100", "--level-fractions", "0.3", "--progress", "--json"},
                                "", {}, [&, number = signal](pid_t child) {
                                  signal_when(child, number, [&] { return has_spoken(); });
                                });
    EXPECT_EQ(stopped.code, code) << stopped.err;
    EXPECT_THAT(stopped.err, HasSubstr("stopping"));
    EXPECT_EQ(stopped.last("error")["message"], "stopped by a signal");
    EXPECT_EQ(files(), "capture.h5\n");
  }
}

#ifdef SQZ_WITH_TRAINING
// A write beyond RLIMIT_FSIZE, as one to a full disk. A program of its own: HDF5 has its own ideas
// of how a process ends.
TEST_F(IndexToolTest, ACaptureThatFindsNoRoomIsOneError) {
  write_all(path("a.txt"), std::string(4000, 'a'));
  const std::string command =
      concat("trap '' XFSZ; ulimit -f 100; exec " SQZ_INDEX_TOOL " capture --model ",
             SQZ_SOURCE_DIR "/examples/models/nano ", path("a.txt"), " -o ", path("x.h5"));
  const ToolRun full = run("/bin/sh", {"-c", command});
  EXPECT_EQ(full.code, 1);
  EXPECT_THAT(full.err, HasSubstr("x.h5: write /layers/"));
  EXPECT_THAT(full.err, HasSubstr(": File too large"));
  EXPECT_EQ(std::count(full.err.begin(), full.err.end(), '\n'), 1) << full.err;
  EXPECT_EQ(files(), "a.txt\n");
}
#endif

#ifndef SQZ_WITH_TRAINING
TEST_F(IndexToolTest, WithoutLibTorchAModelIsRefusedWithTheWayOut) {
  const std::string model = SQZ_SOURCE_DIR "/examples/models/nano";
  write_all(path("a.txt"), std::string(4000, 'a'));
  expect_refused({"build", "--model", model, path("a.txt"), "-o", path("x.sqz")}, 3,
                 "-DSQZ_TRAINING=ON");
  expect_refused({"capture", "--model", model, path("a.txt"), "-o", path("x.h5")}, 3,
                 "-DSQZ_TRAINING=ON");
}
#endif

}  // namespace
}  // namespace sqz
