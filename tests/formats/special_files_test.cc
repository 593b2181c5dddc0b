// Everything that reads files refuses special files at once: a pipe would wait for a writer, and
// /dev/zero has no end.
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "formats/capture.h"
#include "formats/checkpoint.h"
#include "formats/layers_file.h"
#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "formats/tokenizer.h"
#include "tests/common/temporary_directory.h"

namespace sqz {
namespace {

TEST(SpecialFiles, AreRefusedAtOnce) {
  Env& env = Env::posix();
  const std::map<std::string, std::function<Status(const std::string&)>> readers = {
      {"index, mapped", [](const auto& path) { return SqzFile::open(path).status(); }},
      {"index, read",
       [](const auto& path) { return SqzFile::open(path, OpenMode::kRead).status(); }},
      {"layer profile", [](const auto& path) { return read_layers_file(path).status(); }},
      {"query classifier", [](const auto& path) { return read_qmodel_file(path).status(); }},
      {"capture", [](const auto& path) { return CaptureReader::open(path).status(); }},
      {"tokenizer.json", [](const auto& path) { return Tokenizer::load(path + ".json").status(); }},
      {"prompts and texts", [&](const auto& path) { return read_text_file(env, path).status(); }}};
  testing::TemporaryDirectory folder;
  const auto make_each = [&](const std::string& path, const std::function<void()>& check) {
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    check();
    std::filesystem::remove(path);
    for (const char* target : {"/dev/zero", "/"}) {
      ASSERT_EQ(::symlink(target, path.c_str()), 0);
      check();
      std::filesystem::remove(path);
    }
  };
  ::alarm(60);
  for (const auto& [name, read] : readers) {
    const std::string path = folder.file("special");
    const std::string file = path + (name.starts_with("tokenizer") ? name.substr(9) : "");
    make_each(file, [&, read = read, name = name] {
      // A tokenizer may be in a folder.
      const char* sentence = std::filesystem::is_directory(file) && file != path
                                 ? "no tokenizer.json"
                                 : "not a regular file";
      EXPECT_THAT(read(path).message(), ::testing::HasSubstr(sentence)) << name;
    });
  }
  // The files of a model's folder, of which each is opened when those before are right.
  const std::filesystem::path golden = SQZ_SOURCE_DIR "/tests/golden/logits/llama-yarn-sharded";
  for (const char* name : {"config.json", "generation_config.json", "model.safetensors.index.json",
                           "model-00002-of-00004.safetensors"}) {
    testing::TemporaryDirectory model;
    for (const auto& entry : std::filesystem::directory_iterator(golden)) {
      if (entry.path().filename() == name) continue;
      std::filesystem::create_symlink(entry.path(), model.file(entry.path().filename()));
    }
    make_each(model.file(name), [&] {
      EXPECT_THAT(Checkpoint::open(model.path()).status().message(),
                  ::testing::HasSubstr("not a regular file"))
          << name;
    });
  }
  ::alarm(0);
}

}  // namespace
}  // namespace sqz
