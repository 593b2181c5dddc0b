// formats/base/file.h: reading, and publishing whole files only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "formats/base/file.h"
#include "formats/base/temporaries.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;
using testing::read_file;
using testing::TemporaryDirectory;
using testing::write_file;

TEST(File, ReadsAndMaps) {
  TemporaryDirectory dir;
  write_file(dir.file("a"), "hello");
  write_file(dir.file("empty"), "");
  const auto file = must(Env::posix().open_read(dir.file("a")));
  std::string out(3, '?');
  ASSERT_TRUE(file->read(2, std::as_writable_bytes(std::span(out))).ok());
  EXPECT_EQ(out, "llo");
  EXPECT_EQ(file->read(3, std::as_writable_bytes(std::span(out))).code(), Code::kCorrupt);
  EXPECT_EQ(static_cast<char>((*file->map())->bytes()[4]), 'o');
  EXPECT_TRUE((*(*Env::posix().open_read(dir.file("empty")))->map())->bytes().empty());
  EXPECT_EQ(read_text_file(Env::posix(), dir.file("a"), 4).status().code(), Code::kUnsupported);
}

TEST(File, ErrorsNamePathAndCall) {
  TemporaryDirectory dir;
  Env& env = Env::posix();
  const Status missing = env.open_read(dir.file("none")).status();
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_EQ(missing.message(), dir.file("none") + ": open: No such file or directory");
  EXPECT_EQ(env.create(dir.file("no/such/dir"), Temporary::kNamed).status().code(),
            Code::kNotFound);
  write_file(dir.file("a"), "x");
  EXPECT_EQ(env.create(dir.file("a"), Temporary::kNamed).status().code(), Code::kExists);
  EXPECT_THAT(env.rename(dir.file("none"), dir.file("b"), true).message(), HasSubstr("rename"));
  EXPECT_EQ(io_error("a", "write", ENOSPC).message(),
            "a: write: No space left on device; free some space on that file system and try again");
  EXPECT_THAT(env.check_room(dir.file("a"), UINT64_MAX).message(),
              HasSubstr("needs 18446744073709551615 bytes"));
}

TEST(AtomicFile, AFileThatAppearedMeanwhileIsKept) {
  TemporaryDirectory dir;
  const std::string path = dir.file("out");
  {
    auto file = must(AtomicFile::create(Env::posix(), path, false));
    write_file(path, "somebody else's");
    EXPECT_EQ(file.commit().code(), Code::kExists);
  }
  EXPECT_EQ(read_file(path), "somebody else's");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(AtomicFile, LeftoversOfTheSameProcessNumberAreNoObstacle) {
  TemporaryDirectory dir;
  const std::string path = dir.file("out");
  const auto named = Temporary::kNamed;
  std::string last = AtomicFile::create(Env::posix(), path, false, named)->temporary_path();
  const size_t dot = last.rfind('.') + 1;
  const int64_t number = std::stoll(last.substr(dot));
  for (int64_t n = 1; n <= 3; ++n)
    write_file(last.substr(0, dot) + std::to_string(number + n), "left");
  auto file = must(AtomicFile::create(Env::posix(), path, false, named));
  EXPECT_TRUE(file.commit().ok());
}

TEST(AtomicFile, HasNoNameBeforeItIsPublished) {
  TemporaryDirectory dir;
  write_file(dir.file("old"), "old");
  for (const char* name : {"old", "new"}) {
    auto file = must(AtomicFile::create(Env::posix(), dir.file(name), true));
    ASSERT_TRUE(file.file().write(0, std::as_bytes(std::span("new", 3))).ok());
    EXPECT_EQ(file.temporary_path(), "") << "tests run on a file system that has O_TMPFILE";
    EXPECT_THAT(dir.names(), ::testing::Each(::testing::Not(HasSubstr(".tmp."))));
    ASSERT_TRUE(file.commit().ok());
    EXPECT_EQ(read_file(dir.file(name)), "new");
  }
  EXPECT_THAT(dir.names(), ::testing::UnorderedElementsAre("old", "new"));
}

TEST(AtomicFile, RefusesToReplaceWhatIsNoFile) {
  TemporaryDirectory dir;
  ASSERT_EQ(::mkfifo(dir.file("pipe").c_str(), 0600), 0);
  ASSERT_EQ(::mkdir(dir.file("folder").c_str(), 0700), 0);
  for (const Temporary kind : {Temporary::kNamed, Temporary::kUnnamed}) {
    for (const char* name : {"pipe", "folder"}) {
      const auto file = AtomicFile::create(Env::posix(), dir.file(name), true, kind);
      EXPECT_EQ(file.status().code(), Code::kInvalidArgument) << file.status().message();
    }
  }
  EXPECT_THAT(dir.names(), ::testing::UnorderedElementsAre("pipe", "folder"));
}

TEST(AtomicFile, ASignalHandlerRemovesItsNameUntilItIsPublished) {
  TemporaryDirectory dir;
  {
    auto lost = AtomicFile::create(Env::posix(), dir.file("lost"), false, Temporary::kNamed);
    auto kept = AtomicFile::create(Env::posix(), dir.file("kept"), false, Temporary::kNamed);
    ASSERT_TRUE(lost.ok() && kept.ok() && kept->commit().ok());
    write_file(dir.file("scratch"), "");
    const TemporaryName scratch(dir.file("scratch"));
    remove_temporaries();
    EXPECT_EQ(dir.names(), std::vector<std::string>{"kept"});
    write_file(dir.file("scratch"), "");
  }
  remove_temporaries();
  EXPECT_EQ(dir.names(), std::vector<std::string>{"kept"}) << "scratch ends with its object";
}

TEST(AtomicFile, OneOfTwoWritersWins) {
  TemporaryDirectory dir;
  for (int round = 0; round < 300; ++round) {
    const std::string path = dir.file(std::to_string(round));
    std::atomic<int> ready{0}, published{0}, refused{0};
    const auto write = [&] {
      auto file = AtomicFile::create(Env::posix(), path, false);
      ++ready;
      while (ready < 2) std::this_thread::yield();
      if (!file.ok()) return;
      const Status status = file->commit();
      if (status.ok()) ++published;
      if (status.code() == Code::kExists) ++refused;
    };
    std::thread other(write);
    write();
    other.join();
    ASSERT_EQ(published, 1);
    ASSERT_EQ(refused, 1);
  }
}

TEST(AtomicFile, KeepsPermissionsAndSymbolicLinks) {
  namespace fs = std::filesystem;
  TemporaryDirectory dir;
  fs::create_directory(dir.file("elsewhere"));
  const std::string path = dir.file("out"), end = dir.file("elsewhere/real");
  write_file(end, "old");
  fs::permissions(end, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink(end, path);
  auto file = must(AtomicFile::create(Env::posix(), path, true));
  ASSERT_TRUE(file.file().write(0, std::as_bytes(std::span("new", 3))).ok());
  ASSERT_TRUE(file.commit().ok());
  EXPECT_TRUE(fs::is_symlink(path));
  EXPECT_EQ(read_file(end), "new");
  EXPECT_EQ(fs::status(end).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_FALSE(AtomicFile::create(Env::posix(), path, false).ok());
}

TEST(AtomicFile, AFolderThatCannotBeSyncedIsNoFailure) {
  TemporaryDirectory dir;
  std::filesystem::permissions(dir.path(), std::filesystem::perms{0333});  // nobody may list it
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(2);
    auto file = AtomicFile::create(Env::posix(), dir.file("out"), false);
    ::_exit(file.ok() && file->commit().ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  std::filesystem::permissions(dir.path(), std::filesystem::perms{0755});
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::exists(dir.file("out")));
}

// As root: a link in somebody's folder that a third user made.
TEST(AtomicFile, LinksOfOthersAreReplacedAndNotFollowed) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to make files of other users";
  TemporaryDirectory dir;
  const std::string path = dir.file("out"), end = dir.file("precious");
  for (const uid_t owner : {uid_t{1234}, uid_t{0}}) {
    write_file(end, "old");
    std::filesystem::permissions(end, std::filesystem::perms{0666});
    std::filesystem::remove(path);
    std::filesystem::create_symlink(end, path);
    ASSERT_EQ(::lchown(path.c_str(), owner, owner), 0);
    auto file = AtomicFile::create(Env::posix(), path, true);
    ASSERT_TRUE(file.ok() && file->file().write(0, std::as_bytes(std::span("new", 3))).ok());
    ASSERT_TRUE(file->commit().ok());
    EXPECT_EQ(std::filesystem::is_symlink(path), owner == 0);
    EXPECT_EQ(read_file(end), owner == 0 ? "new" : "old");
    EXPECT_EQ(read_file(path), "new");
    const auto mode = std::filesystem::status(path).permissions();
    EXPECT_EQ((mode & std::filesystem::perms::others_write) != std::filesystem::perms::none,
              owner == 0);
  }
}

}  // namespace
}  // namespace sqz
