// A call that writes, flushes, closes, links or renames an output fails once, each of them in turn:
// the tool says so and there is nothing under the output's name, or the file is right.
//
// SQZ_FAULT_CALLS: calls of each command that are tried, spread over all; 0: all. By default 8 of a
// command that runs the model, all of the others.
#include <gmock/gmock.h>

#include <cerrno>
#include <cstdlib>

#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

struct Command {
  const char* name;
  std::string words;
  const char* output;  // in the folder
  bool model = false;  // it runs the model
};

class FailingWrite : public ToolTest, public ::testing::WithParamInterface<Command> {
 protected:
  void SetUp() override {
    inputs_ = folder_ / "inputs";
    fs::create_directories(inputs_);
    variables["IN"] = inputs_.string();
    variables["OUT"] = (folder_ / "work").string();
    write_small_capture(inputs_ / "a.h5", 300, 120);
    write_file(inputs_ / "m.jsonl", R"({"key": "x", "capture": "a.h5"})"
                                    "\n");
    const std::string book = read_file(SQZ_SOURCE_DIR "/examples/texts/dracula.txt");
    write_file(inputs_ / "a.txt", book.substr(4000, 1500));
    write_file(inputs_ / "long.txt", book.substr(4000, 6000));
    write_file(inputs_ / "q.txt", "Who was silent?\n");
    expect({"sqz-index build --capture $IN/a.h5 -o $IN/a.sqz"});
    if (GetParam().model) expect({"sqz-index build -m $MODEL $IN/a.txt -o $IN/b.sqz"});
  }

  // The command, whose call `at` fails with `error`; a negative `at`: none does.
  ToolRun run_once(int64_t at, int error) const {
    fs::remove_all(path(""));
    fs::create_directories(path(""));
    std::vector<std::string> words = words_of(GetParam().words);
    const std::string tool = words.front();
    words.erase(words.begin());
    words.insert(words.end(), {"--threads", "1", "-q"});
    return run(tool, words, "",
               {"SQZ_KILL_DIR=" + (folder_ / "work").string(),
                "SQZ_KILL_COUNT=" + (folder_ / "count").string(), concat("SQZ_KILL_AT=", at),
                concat("SQZ_FAIL_WITH=", error)});
  }

  fs::path inputs_;
};

const Command kCommands[] = {
    {"build", "sqz-index build --capture $IN/a.h5 -o $OUT/x.sqz", "x.sqz"},
    {"corpus", "sqz-index build --manifest $IN/m.jsonl -o $OUT", "x.sqz"},
    {"compress", "sqz-index compress $IN/a.sqz -o $OUT/x.sqz --rows q8", "x.sqz"},
#ifdef SQZ_WITH_TRAINING
    {"calibrate",
     "sqz-index calibrate $IN/b.sqz -m $MODEL --prompts $IN/q.txt --answer-tokens 1 -o $OUT/x.sqz",
     "x.sqz", true},
    {"profile", "sqz-profile-layers -m $MODEL $IN/a.txt --tokens 300 -o $OUT/x.json", "x.json",
     true},
    {"train",
     "sqz-train-qmodel -m $MODEL $IN/long.txt -o $OUT/x.sqz --buckets 8 --hidden 8 --window 300 "
     "--recent 32 --positions 16 --queries 16 --batch 8 --keys 32 --steps 1",
     "x.sqz", true},
#endif
};

INSTANTIATE_TEST_SUITE_P(Commands, FailingWrite, ::testing::ValuesIn(kCommands),
                         [](const auto& all) { return std::string(all.param.name); });

TEST_P(FailingWrite, IsAnErrorOrTheRightBytes) {
  const fs::path output = path(GetParam().output);
  const ToolRun good = run_once(-1, EIO);
  ASSERT_EQ(good.code, 0) << good.err;
  const std::string bytes = read_file(output);
  const int64_t calls = std::stoll(read_file(folder_ / "count"));
  ASSERT_GT(calls, 2);
  const char* wanted = std::getenv("SQZ_FAULT_CALLS");
  const int64_t most = wanted != nullptr ? std::atoll(wanted) : GetParam().model ? 8 : 0;
  const int64_t tries = most > 0 ? std::min(most, calls) : calls;
  constexpr int kErrors[] = {EIO, ENOSPC, EDQUOT, 0};
  for (int64_t i = 0; i < tries; ++i) {
    const int64_t at = tries > 1 ? i * (calls - 1) / (tries - 1) : 0;
    const int error = kErrors[static_cast<size_t>(i) % std::size(kErrors)];
    const ToolRun found = run_once(at, error);
    SCOPED_TRACE(concat("call ", at, " of ", calls, ", errno ", error, ": ", found.err));
    if (found.code == 0) {
      EXPECT_TRUE(read_file(output) == bytes);
    } else {
      EXPECT_LE(found.code, 3);
      EXPECT_NE(found.err, "");
    }
    // A name may be there if it was given and the folder could not be flushed; then it is right.
    if (fs::exists(output)) {
      EXPECT_TRUE(read_file(output) == bytes);
    }
    for (const auto& entry : fs::directory_iterator(path(""))) {  // a temporary, if unlink() failed
      EXPECT_THAT(entry.path().filename().string(), ::testing::StartsWith(GetParam().output));
    }
  }
}

}  // namespace
}  // namespace sqz
