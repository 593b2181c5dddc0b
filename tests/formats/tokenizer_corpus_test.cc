// Runs only where SQZ_CORPUS names the folder of texts that corpus_hashes.json was made from
// (scripts/make_tokenizer_goldens.py --corpus): every file, every stored tokenizer.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/formats/tokenizer_golden.h"

namespace sqz {
namespace {

TEST(TokenizerCorpus, EveryFileHasTheSameIds) {
  const char* corpus = std::getenv("SQZ_CORPUS");
  if (corpus == nullptr) GTEST_SKIP() << "SQZ_CORPUS names no folder of texts";
  const Json golden = testing::read_golden("corpus_hashes.json");
  for (const auto& [name, files] : golden.items()) {
    const auto tokenizer = testing::load_golden(name);
    ASSERT_TRUE(tokenizer);
    size_t equal = 0;
    for (const auto& [file, expected] : files.items()) {
      const auto text = read_text_file(Env::posix(), concat(corpus, '/', file));
      ASSERT_TRUE(text.ok()) << text.status().message();
      std::vector<int32_t> ids;
      ASSERT_TRUE(tokenizer->encode(*text, true, ids).ok()) << file;
      const bool same = ids.size() == expected[0].get<size_t>() &&
                        testing::hash_of(ids) == expected[1].get<std::string>();
      EXPECT_TRUE(same) << name << ": " << file;
      equal += same ? 1 : 0;
      // Normalising tokenizers and sentencepiece's prefix space give another text back.
      if (name == "nano" || name == "gpt2") {
        EXPECT_TRUE(*tokenizer->decode(ids) == *text) << name << ": " << file;
      }
    }
    std::printf("%s: %zu of %zu files equal\n", name.c_str(), equal, files.size());
  }
}

}  // namespace
}  // namespace sqz
