// What the tests of every kind of .sqz file have in common: a file that was changed in one place,
// and what must come of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "formats/base/status.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/fault_env.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/fuzz/memory_env.h"

namespace sqz::testing {

// One change, and what the reader says of it.
struct Wrong {
  const char* name;
  std::function<void(RawIndex&)> change;
  std::string says;
  Code code = Code::kCorrupt;
};

// An entry of "__metadata__" with another value, or left out.
inline Wrong meta(const char* name, const char* key, const char* value, std::string says,
                  Code code = Code::kCorrupt) {
  return {name, [=](RawIndex& file) { file.metadata[key] = value; }, std::move(says), code};
}

inline Wrong without(const char* name, const char* key) {
  return {name, [=](RawIndex& file) { file.metadata.erase(key); },
          concat("__metadata__: ", key, ": found nothing, expected a value")};
}

// One element of a tensor.
template <class T>
Wrong value(const char* name, const char* tensor, size_t at, T found, std::string says) {
  return {name, [=](RawIndex& file) { file.set(tensor, at, found); }, std::move(says)};
}

// Changes the whole file at `path`, with checksums that fit the change: `read` refuses it.
inline void expect_refused(const Wrong& wrong, const std::string& path,
                           const std::function<Status(const std::string&)>& read) {
  RawIndex raw = RawIndex::read(path);
  wrong.change(raw);
  if (raw.metadata.contains("checksums")) raw.fix_checksums();
  write_file(path, raw.bytes());
  const Status status = read(path);
  EXPECT_EQ(status.code(), wrong.code);
  EXPECT_THAT(status.message(), ::testing::HasSubstr(path));
  EXPECT_THAT(status.message(), ::testing::HasSubstr(wrong.says));
}

// No file that differs from `bytes` in one bit, or ends early, is read.
inline void expect_every_damage_refused(std::string bytes,
                                        const std::function<Status(Env&)>& read) {
  const auto readable = [&](const std::string& text) {
    MemoryEnv env(std::as_bytes(std::span(text)));
    return read(env).ok();
  };
  ASSERT_TRUE(readable(bytes));
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << bit);
      ASSERT_FALSE(readable(bytes)) << "byte " << at << " bit " << bit;
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << bit);
    }
  }
  for (size_t length = 0; length < bytes.size(); ++length) {
    ASSERT_FALSE(readable(bytes.substr(0, length))) << length;
  }
}

// Writing makes at least `least` calls of the file system, and leaves nothing if one of them fails.
inline void expect_failures_leave_nothing(
    size_t least, const std::function<Status(Env&, const std::string& path)>& write) {
  TemporaryDirectory count_dir;
  FailNth count;
  FaultEnv counted(count.hook());
  ASSERT_TRUE(write(counted, count_dir.file("f.sqz")).ok());
  ASSERT_GE(count.calls.size(), least);
  for (int nth = 0; !is_after_publishing(count.calls[static_cast<size_t>(nth)]); ++nth) {
    TemporaryDirectory dir;
    FailNth fail;
    fail.fail_at = nth;
    FaultEnv env(fail.hook());
    EXPECT_FALSE(write(env, dir.file("f.sqz")).ok());
    EXPECT_TRUE(std::filesystem::is_empty(dir.path())) << count.calls[static_cast<size_t>(nth)];
  }
}

}  // namespace sqz::testing
