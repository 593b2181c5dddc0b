// sqz-index build and SIGKILL, at calls that change a file and at random moments. Whenever it
// comes, OUTPUT is the old file, the new one or none. The same command then gives the bytes of a
// build that nobody killed, also under the same process number.
//
// SQZ_CRASH_KILLS: builds that are killed, of each kind and file system (default 2). Two thirds are
// killed at calls, from the last one backwards.
#include <gmock/gmock.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

struct Build {
  const char* name;
  bool replaces;  // an older file
  bool unnamed;   // the file system has O_TMPFILE
  const char* folder;
};

class CrashTest : public ToolTest, public ::testing::WithParamInterface<Build> {
 protected:
  void SetUp() override {
    if (elsewhere_.path().empty()) GTEST_SKIP() << "there is no " << GetParam().folder;
    folder_ = elsewhere_.path();
    write_small_capture(folder_ / "a.h5", 300, 120);
  }

  // The build, killed at call `at` (negative: not at all) or when `while_running` does so.
  ToolRun build(int64_t at, const std::function<void(pid_t)>& while_running = {}) const {
    std::vector<std::string> arguments = {"build",     "--capture", folder_ / "a.h5", "-o", output_,
                                          "--threads", "1"};
    if (GetParam().replaces) arguments.emplace_back("--force");
    std::vector<std::string> environment = {"SQZ_KILL_DIR=" + (folder_ / "work").string(),
                                            "SQZ_KILL_COUNT=" + (folder_ / "count").string(),
                                            concat("SQZ_KILL_AT=", at)};
    if (!GetParam().unnamed) environment.emplace_back("SQZ_NO_TMPFILE=1");
    return run("sqz-index", arguments, "", environment, while_running);
  }

  void begin_anew() const {
    fs::remove_all(path(""));
    fs::create_directories(path(""));
    if (GetParam().replaces) write_file(output_, "old");
  }

  const testing::TemporaryDirectory elsewhere_{GetParam().folder};
  std::string output_ = "unset";
};

INSTANTIATE_TEST_SUITE_P(Builds, CrashTest,
                         ::testing::Values(Build{"New", false, true, P_tmpdir},
                                           Build{"Replacing", true, true, P_tmpdir},
                                           Build{"Named", true, false, P_tmpdir},
                                           Build{"InMemory", true, true, "/dev/shm"}),
                         [](const auto& all) { return std::string(all.param.name); });

TEST_P(CrashTest, OldOrNewFileAndTheSameBytesInTheEnd) {
  output_ = path("x.sqz");
  const char* wanted = std::getenv("SQZ_CRASH_KILLS");
  const int64_t builds = wanted == nullptr ? 2 : std::atoll(wanted);
  begin_anew();
  const auto start = std::chrono::steady_clock::now();
  ASSERT_EQ(build(-1).code, 0);
  const std::chrono::duration<double> duration = std::chrono::steady_clock::now() - start;
  const std::string whole = read_file(output_);
  const int64_t calls = std::stoll(read_file(folder_ / "count"));
  ASSERT_GT(calls, 10);

  std::mt19937_64 random(1);
  const int64_t at_calls = std::min(calls, builds - (builds + 2) / 3);
  for (int64_t i = 0; i < builds; ++i) {
    begin_anew();
    if (i < at_calls) {
      ASSERT_EQ(build(calls - 1 - (i * calls + calls / 2) / at_calls).code, 128 + SIGKILL);
    } else {
      build(-1, [&](pid_t child) {
        std::this_thread::sleep_for(duration * (static_cast<double>(random() % 1000) / 1000));
        ::kill(child, SIGKILL);
      });
    }
    SCOPED_TRACE(concat("build ", i, ", ", calls, " calls"));
    ASSERT_TRUE(fs::exists(output_) || !GetParam().replaces) << "the old file is gone";
    if (fs::exists(output_)) {
      const std::string found = read_file(output_);
      ASSERT_TRUE(found == whole || (GetParam().replaces && found == "old"));
    }
    if (GetParam().replaces || !fs::exists(output_)) {
      ASSERT_EQ(build(-1).code, 0);
    }
    ASSERT_TRUE(read_file(output_) == whole);
    if (GetParam().unnamed && !GetParam().replaces) {
      ASSERT_EQ(files(), "x.sqz\n");
    }
    for (const auto& entry : fs::directory_iterator(path(""))) {
      EXPECT_THAT(entry.path().filename().string(), ::testing::StartsWith("x.sqz"));
    }
  }
}

}  // namespace
}  // namespace sqz
