// Options that all tools share, and the numbers that options take.
#include <gmock/gmock.h>

#include <regex>

#include "formats/base/parallel.h"
#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

const char* const kTools[] = {"sqz-index",
#ifdef SQZ_WITH_TRAINING
                              "sqz-eval", "sqz-generate", "sqz-profile-layers", "sqz-train-qmodel"
#endif
};

class Options : public ToolTest {
 protected:
  // Pairs of a command ("" if the tool has none) and its --help.
  std::vector<std::pair<std::string, std::string>> helps(const std::string& tool) const {
    const std::string top = run(tool, {"--help"}).out;
    std::vector<std::pair<std::string, std::string>> out;
    std::istringstream lines(top);
    bool list = false;
    for (std::string line; std::getline(lines, line);) {
      list = line == "Subcommands:" || (list && !line.empty());
      if (!list || !line.starts_with("  ") || line[2] == ' ') continue;
      const std::string command = line.substr(2, line.find(' ', 2) - 2);
      out.emplace_back(command, run(tool, {command, "--help"}).out);
    }
    if (out.empty()) out.emplace_back("", top);
    return out;
  }
};

// NaN passes CLI11's own ranges, and 64 bits do not hold each --seed.
TEST_F(Options, NumbersAreNumbers) {
  const std::regex option("^  (?:-[a-z],)?(--[a-z0-9-]+) (UINT|FLOAT)\\b");
  for (const std::string tool : kTools) {
    int checked = 0;
    for (const auto& [command, help] : helps(tool)) {
      std::istringstream lines(help);
      for (std::string line; std::getline(lines, line);) {
        std::smatch found;
        if (!std::regex_search(line, found, option)) continue;
        const std::string value = found[2] == "UINT" ? "99999999999999999999" : "nan";
        const std::string name = found[1];
        expect({concat(tool, " ", command, " ", name, "=", value), 2, {name, value}});
        ++checked;
      }
    }
    EXPECT_GT(checked, 0) << tool;
  }
}

TEST_F(Options, WrongWordsAreNamed) {
  expect_all({
      {"sqz-index", 2, {"a command is required"}},
      {"sqz-index bilud", 2, {"no command bilud", "build"}},
      {"sqz-index info a.sqz --verbse", 2, {"no option --verbse; did you mean --verbose?"}},
      {"sqz-index info a.sqz --nothing-like-it=3", 2, {"no option --nothing-like-it"}},
      {"sqz-index info a.sqz --threads -1", 2, {"--threads", "-1"}},
      {"sqz-index info a.sqz --device gpu", 2, {"--device", "gpu"}},
      {"sqz-index info a.sqz", 3, {"a.sqz"}},
  });
}

TEST_F(Options, MoreThreadsThanCoresAreReduced) {
  write_file(path("seed.sqz"),
             read_file(SQZ_SOURCE_DIR "/tests/fuzz/seeds/sqz_file_fuzz/two_levels.sqz"));
  const ToolRun many = run("sqz-index", {"verify", path("seed.sqz"), "--threads", "4096"});
  EXPECT_EQ(many.code, 0) << many.err;
  EXPECT_THAT(many.err, HasSubstr("--threads 4096: this process may use"));
  const ToolRun quiet = run("sqz-index", {"verify", path("seed.sqz"), "--threads", "4096", "-q"});
  EXPECT_EQ(quiet.err, "");
  EXPECT_NE(quiet.out, "") << "results are printed";
  for (const char* file : {"seed.sqz", "none.sqz"}) {
    const ToolRun silent = run("sqz-index", {"verify", path(file), "-qq"});
    EXPECT_EQ(silent.out + silent.err, "") << file;
  }
}

TEST_F(Options, ContainersHaveTheCoresOfTheirQuota) {
  std::filesystem::create_directories(path("fs/pods/mine"));
  write_file(path("fs/pods/cpu.max"), "150000 100000\n");
  write_file(path("fs/pods/mine/cpu.max"), "max 100000\n");
  write_file(path("group"), "1:cpu:/other\n0::/pods/mine\n");
  EXPECT_EQ(quota_cores(path("group"), path("fs")), 2);
  write_file(path("fs/pods/mine/cpu.max"), "50000 100000\n");
  EXPECT_EQ(quota_cores(path("group"), path("fs")), 1);
  write_file(path("group"), "0::/\n");
  EXPECT_EQ(quota_cores(path("group"), path("fs")), std::numeric_limits<int>::max());
}

TEST_F(Options, TextOfAFileCannotCommandATerminal) {
  EXPECT_EQ(run("sqz-index", {"info", path("a\x1b[2J\xc2\x9b.sqz")}).err.find_first_of("\x1b\x9b"),
            std::string::npos);
  write_file(path("m.jsonl"), R"({"key": "a\u001b[2J\u009b\nforged", "capture": "none.h5"})");
  const ToolRun failed =
      run("sqz-index", {"build", "--manifest", path("m.jsonl"), "-o", path("out")});
  EXPECT_THAT(failed.err, HasSubstr(R"(a\x1b[2J\x9b\x0aforged)"));
  EXPECT_EQ(failed.err.find_first_of("\x1b\x9b"), std::string::npos);
}

}  // namespace
}  // namespace sqz
