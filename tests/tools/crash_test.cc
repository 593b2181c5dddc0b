// sqz-index build and SIGKILL: at every call that changes a file, and at any moment. Whenever it
// comes, OUTPUT is the old file, the new one or none; the same command then gives the bytes of a
// build that nobody killed, also under the same process number; and sqz-index gc leaves nothing but
// OUTPUT.
//
// SQZ_CRASH_KILLS: builds that are killed, of each kind and file system (default 2). First at every
// call, or where there are more calls at some of them, then at random moments.
#include <gmock/gmock.h>
#include <sys/vfs.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "formats/base/file.h"
#include "tests/tools/run_tool.h"
#include "tests/tools/small_capture.h"

namespace sqz {
namespace {

namespace fs = std::filesystem;

struct Build {
  const char* name;
  bool replaces;  // an older file
  bool unnamed;   // the file system has O_TMPFILE
  bool resume;
  bool model;  // from a model and a text, not from a capture
};

std::string file_system_of(const std::string& path) {
  struct statfs info {};
  ::statfs(path.c_str(), &info);
  return info.f_type == 0xef53 ? "ext4" : info.f_type == 0x01021994 ? "tmpfs" : "another";
}

class CrashTest : public ToolTest,
                  public ::testing::WithParamInterface<std::tuple<Build, const char*>> {
 protected:
  void SetUp() override {
    const std::string base = std::get<1>(GetParam());
    if (!fs::is_directory(base)) GTEST_SKIP() << "there is no " << base;
    folder_ = fs::path(base) / concat("sqz_crash_", build_.name, "_", ::getpid());
    fs::create_directories(folder_ / "work");
    if (build_.model) {
      write_all(source(), std::string(2000, 'a'));
    } else {
      write_small_capture(source(), 300, 120);
    }
  }

  std::string source() const { return (folder_ / (build_.model ? "a.txt" : "a.h5")).string(); }

  // The build, killed at call `at` (negative: not at all) or when `while_running` does so.
  ToolRun run_build(int64_t at, const std::function<void(pid_t)>& while_running = {}) const {
    std::vector<std::string> arguments = {"build", "-o", path("x.sqz"), "--json", "--threads", "1"};
    if (build_.model) {
      arguments.insert(arguments.end(), {"-m", SQZ_SOURCE_DIR "/examples/models/nano", source()});
    } else {
      arguments.insert(arguments.end(), {"--capture", source()});
    }
    if (build_.replaces) arguments.emplace_back("--force");
    if (build_.resume) arguments.emplace_back("--resume");
    std::vector<std::string> environment = {"SQZ_KILL_DIR=" + (folder_ / "work").string(),
                                            "SQZ_KILL_COUNT=" + (folder_ / "count").string(),
                                            concat("SQZ_KILL_AT=", at)};
    if (!build_.unnamed) environment.emplace_back("SQZ_NO_TMPFILE=1");
    return run("sqz-index", arguments, "", environment, while_running);
  }

  void begin_anew() const {
    fs::remove_all(path(""));
    fs::create_directories(path(""));
    if (build_.replaces) write_all(path("x.sqz"), "old");
  }

  // Nothing that is there may be anything but a whole file.
  void expect_old_or_new(const std::string& when) {
    if (!fs::exists(path("x.sqz"))) {
      EXPECT_FALSE(build_.replaces) << "the old file is gone, " << when;
      return;
    }
    const std::string found = read_all(path("x.sqz"));
    published_ += found == whole_;
    EXPECT_TRUE(found == whole_ || (build_.replaces && found == "old")) << when;
  }

  void expect_it_goes_on(const std::string& when) {
    if (build_.resume || build_.replaces || !fs::exists(path("x.sqz"))) {
      const ToolRun again = run_build(-1);
      ASSERT_EQ(again.code, 0) << when << ": " << again.err;
      went_on_ += again.last()["resumed"].get<int64_t>() > 0;
    }
    EXPECT_TRUE(read_all(path("x.sqz")) == whole_) << when;
    ASSERT_TRUE(find_leftovers(path(""), true).ok());  // what sqz-index gc does
    EXPECT_EQ(files(), "x.sqz\n") << when;
  }

  const Build build_ = std::get<0>(GetParam());
  std::string whole_;
  int64_t published_ = 0, went_on_ = 0;
};

constexpr Build kBuilds[] = {{"New", false, true, false, false},
                             {"Replacing", true, true, false, false},
                             {"Named", true, false, false, false},
                             {"Resumed", true, true, true, false},
#ifdef SQZ_WITH_TRAINING
                             {"ResumedModel", false, true, true, true}
#endif
};
INSTANTIATE_TEST_SUITE_P(Builds, CrashTest,
                         ::testing::Combine(::testing::ValuesIn(kBuilds),
                                            ::testing::Values(P_tmpdir, "/dev/shm")),
                         [](const auto& all) {
                           return std::string(std::get<0>(all.param).name) +
                                  (std::string(std::get<1>(all.param)) == P_tmpdir ? ""
                                                                                   : "InMemory");
                         });

TEST_P(CrashTest, OldOrNewFileAndTheSameBytesInTheEnd) {
  const char* wanted = std::getenv("SQZ_CRASH_KILLS");
  const int64_t builds = wanted == nullptr ? 2 : std::atoll(wanted);
  begin_anew();
  const auto start = std::chrono::steady_clock::now();
  ASSERT_EQ(run_build(-1).code, 0);
  const std::chrono::duration<double> duration = std::chrono::steady_clock::now() - start;
  whole_ = read_all(path("x.sqz"));
  const int64_t calls = std::stoll(read_all(folder_ / "count"));
  ASSERT_GT(calls, 10);

  std::mt19937_64 random(1);
  const int64_t at_calls = std::min(calls, builds - (builds + 2) / 3);
  int64_t kills = 0, random_kills = 0;
  for (int64_t i = 0; i < builds; ++i) {
    begin_anew();
    // What goes on may be killed, too.
    for (int64_t again = 0; again <= (build_.resume ? i / 2 % 3 : 0); ++again) {
      std::string when;
      ToolRun killed;
      if (i < at_calls) {
        const int64_t at = again == 0
                               ? calls - 1 - (i * calls + calls / 2) / at_calls
                               : static_cast<int64_t>(random() % static_cast<uint64_t>(calls));
        when = concat("killed at call ", at, " of ", calls);
        killed = run_build(at);
        ASSERT_TRUE(killed.code == 128 + SIGKILL || (again > 0 && killed.code == 0)) << killed.err;
      } else {
        const std::chrono::duration<double> pause =
            duration * (static_cast<double>(random() % 1000) / 1000);
        when = concat("killed after ", pause.count(), " s");
        killed = run_build(-1, [&](pid_t child) {
          std::this_thread::sleep_for(pause);
          ::kill(child, SIGKILL);
        });
        random_kills += killed.code == 128 + SIGKILL;
      }
      kills += killed.code == 128 + SIGKILL;
      expect_old_or_new(when);
      if (HasFailure()) return;
    }
    expect_it_goes_on(concat("build ", i));
    if (HasFailure()) return;
  }
  std::printf(
      "%s: %ld kills, %ld of them at random moments, the others at %ld of %ld calls; %ld "
      "after publication; %ld builds went on\n",
      file_system_of(path("")).c_str(), kills, random_kills, at_calls, calls, published_, went_on_);
  // Two kills may meet no whole layer.
  if (build_.resume && wanted != nullptr) {
    EXPECT_GT(went_on_, 0);
  }
}

#ifdef SQZ_WITH_TRAINING
// A training that is killed has lost nothing that was saved: OUTPUT is whole or not there, the
// checkpoint is there from its first one on, and the same command goes on to the same bytes.
using TrainingCrashTest = ToolTest;
TEST_F(TrainingCrashTest, GoesOnFromItsCheckpoint) {
  const char* wanted = std::getenv("SQZ_CRASH_KILLS");
  const std::string output = path("q.sqz"), checkpoint = output + ".checkpoint";
  const std::string text = folder_ / "a.txt", count = folder_ / "count";
  write_all(text, read_all(SQZ_SOURCE_DIR "/examples/texts/dracula.txt").substr(3000, 24000));
  const auto train = [&](int64_t at, bool resume) {
    std::vector<std::string> arguments = {"-m", SQZ_SOURCE_DIR "/examples/models/nano", text};
    for (const char* more : {"--steps",     "3",         "--checks",
                             "1",           "--buckets", "16",
                             "--hidden",    "32",        "--window",
                             "512",         "--recent",  "64",
                             "--positions", "128",       "--queries",
                             "64",          "--batch",   "64",
                             "--keys",      "32",        "--checkpoint-seconds",
                             "0",           "--threads", "1",
                             "-o"}) {
      arguments.emplace_back(more);
    }
    arguments.push_back(output);
    if (resume) arguments.emplace_back("--resume");
    return run("sqz-train-qmodel", arguments, "",
               {"SQZ_KILL_DIR=" + (folder_ / "work").string(), "SQZ_KILL_COUNT=" + count,
                concat("SQZ_KILL_AT=", at)});
  };
  const ToolRun undisturbed = train(-1, false);
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  const std::string whole = read_all(output);
  const int64_t calls = std::stoll(read_all(count));
  ASSERT_GT(calls, 20);
  const int64_t kills = std::min<int64_t>(calls, wanted == nullptr ? 1 : std::atoll(wanted));
  int64_t went_on = 0;
  for (int64_t i = 0; i < kills; ++i) {
    const int64_t at = (i * calls + calls / 2) / kills;
    SCOPED_TRACE(concat("killed at call ", at, " of ", calls));
    fs::remove(output);
    fs::remove(checkpoint);
    ASSERT_EQ(train(at, false).code, 128 + SIGKILL);
    const bool saved = fs::exists(checkpoint);
    EXPECT_TRUE(saved || went_on == 0 || fs::exists(output)) << "the checkpoint is gone";
    if (!fs::exists(output)) {
      went_on += saved;
      const ToolRun again = train(-1, saved);
      ASSERT_EQ(again.code, 0) << again.err;
      EXPECT_FALSE(fs::exists(checkpoint));
    }
    ASSERT_TRUE(read_all(output) == whole) << "other bytes";
    ASSERT_TRUE(find_leftovers(path(""), true).ok());  // what sqz-index gc does
    fs::remove(checkpoint);                            // of a kill after the output had its name
    EXPECT_EQ(files(), "q.sqz\n");
  }
  EXPECT_GT(went_on, 0);
  std::printf("%ld kills at %ld calls; %ld trainings went on\n", kills, calls, went_on);
}
#endif

}  // namespace
}  // namespace sqz
