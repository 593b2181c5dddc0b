// Ids and decoded text against those that Hugging Face `tokenizers` gave.
#include "formats/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "formats/base/random.h"
#include "formats/utf8.h"
#include "tests/common/must.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/tokenizer_golden.h"

namespace sqz {
namespace {

using testing::golden_path;
using testing::golden_texts;
using testing::hash_of;
using testing::load_golden;
using testing::read_golden;
using testing::TemporaryDirectory;

class GoldenIds : public ::testing::TestWithParam<const char*> {};

void check_decoded(const Json& golden, const char* key, const std::string& text,
                   const std::string& decoded) {
  if (!golden.contains(key)) {
    EXPECT_EQ(decoded, text) << key;
  } else if (golden[key].is_string()) {
    EXPECT_EQ(decoded, golden[key].get<std::string>()) << key;
  } else {
    EXPECT_EQ(hash_of(decoded), golden[key]["xxh3"].get<std::string>()) << key;
  }
}

TEST_P(GoldenIds, EqualOnAdversarialTexts) {
  const std::string name = GetParam();
  const auto tokenizer = load_golden(name);
  ASSERT_TRUE(tokenizer);
  const auto texts = golden_texts();
  const Json goldens = read_golden(name + "_ids.json");
  ASSERT_EQ(goldens.size(), texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    SCOPED_TRACE(concat("text ", i, ": ", texts[i].substr(0, 100)));
    const Json& golden = goldens[i];
    std::vector<int32_t> ids;
    const Status status = tokenizer->encode(texts[i], true, ids);
    ASSERT_TRUE(status.ok()) << status.message();
    if (golden.contains("ids")) {
      EXPECT_EQ(ids, golden["ids"].get<std::vector<int32_t>>());
    } else {
      EXPECT_EQ(ids.size(), golden["count"].get<size_t>());
      EXPECT_EQ(hash_of(ids), golden["xxh3"].get<std::string>());
    }
    const auto decoded = must(tokenizer->decode(ids));
    check_decoded(golden, "decoded", texts[i], decoded);
    const auto special = must(tokenizer->decode(ids, true));
    check_decoded(golden, "decoded_special", texts[i], special);
  }
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, GoldenIds,
                         ::testing::Values("nano", "qwen2", "gpt2", "ignore_merges", "llama2",
                                           "llama2_metaspace"),
                         [](const auto& param_info) { return std::string(param_info.param); });

// Each variant is a patch of one tiny tokenizer.json that shows one feature.
TEST(TokenizerVariants, EqualOnAdversarialTexts) {
  const TemporaryDirectory directory;
  const auto texts = golden_texts();
  const Json golden = read_golden("variants.json");
  for (const Json& variant : golden["variants"]) {
    SCOPED_TRACE(variant["name"].get<std::string>());
    Json file = golden["base"];
    for (const auto& [key, value] : variant["patch"].items()) {
      if (key == "model") {
        file[key].update(value);
      } else {
        file[key] = value;
      }
    }
    const std::string path = directory.file("tokenizer.json");
    testing::write_file(path, file.dump());
    const auto tokenizer = must(Tokenizer::load(path));
    for (size_t i = 0; i < texts.size(); ++i) {
      SCOPED_TRACE(concat("text ", i, ": ", texts[i].substr(0, 100)));
      const Json& expected = variant["cases"][i];
      std::vector<int32_t> ids;
      ASSERT_TRUE(tokenizer->encode(texts[i], true, ids).ok());
      EXPECT_EQ(ids.size(), expected[0].get<size_t>());
      EXPECT_EQ(hash_of(ids), expected[1].get<std::string>());
      std::string decoded = *tokenizer->decode(ids);
      decoded += '\0';
      decoded += *tokenizer->decode(ids, true);
      EXPECT_EQ(hash_of(decoded), expected[2].get<std::string>());
    }
  }
}

// The texts of hostile_texts() in scripts/make_tokenizer_goldens.py.
std::vector<std::string> hostile_texts(uint64_t seed, const std::vector<std::string>& fragments) {
  Random random(seed);
  std::vector<std::string> texts(3000);
  for (std::string& text : texts) {
    for (uint64_t left = random.below(24); left > 0; --left) {
      if (random.below(4) > 0) {
        text += fragments[random.below(fragments.size())];
      } else {
        const auto code = static_cast<uint32_t>(random.below(0x110000));
        append_utf8(code >= 0xd800 && code < 0xe000 ? 'a' : code, text);
      }
    }
  }
  return texts;
}

TEST(Tokenizer, EqualOnHostileTexts) {
  const Json golden = read_golden("hostile.json");
  const auto texts = hostile_texts(golden["seed"], golden["fragments"]);
  for (const auto& [name, hashes] : golden["hashes"].items()) {
    const auto tokenizer = load_golden(name);
    for (size_t first = 0; first < texts.size(); first += 100) {
      std::vector<int32_t> ids;
      for (size_t i = first; i < first + 100; ++i) {
        ASSERT_TRUE(tokenizer->encode(texts[i], true, ids).ok());
      }
      EXPECT_EQ(hash_of(ids), hashes[first / 100].get<std::string>()) << name << " from " << first;
    }
  }
}

TEST(Tokenizer, AppendsAndAddsSpecialTokensOnlyWhenAsked) {
  for (const char* name : {"nano", "llama2"}) {
    SCOPED_TRACE(name);
    const auto tokenizer = load_golden(name);
    ASSERT_TRUE(tokenizer->bos_token());
    std::vector<int32_t> plain;
    std::vector<int32_t> ids{7};
    ASSERT_TRUE(tokenizer->encode("Hello", false, plain).ok());
    ASSERT_TRUE(tokenizer->encode("Hello", true, ids).ok());
    plain.insert(plain.begin(), {7, *tokenizer->bos_token()});
    EXPECT_EQ(ids, plain);
  }
  EXPECT_FALSE(load_golden("gpt2")->bos_token());
}

TEST(Tokenizer, InvalidUtf8NamesTheByteAndLeavesIdsAlone) {
  for (const char* name : {"nano", "llama2"}) {
    const auto tokenizer = load_golden(name);
    for (const char* bad : {"\x80", "\xc0\x80", "\xe2\x82", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                            "\xff", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf"}) {
      std::vector<int32_t> ids{1};
      const Status status = tokenizer->encode(concat("caf\xc3\xa9 and ", bad), true, ids);
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_NE(status.message().find("byte 10"), std::string::npos) << status.message();
      EXPECT_EQ(ids, std::vector<int32_t>{1});
    }
  }
}

TEST(Tokenizer, DecodeRefusesUnknownIds) {
  for (const char* name : {"nano", "llama2"}) {
    const auto tokenizer = load_golden(name);
    const auto beyond = static_cast<int32_t>(tokenizer->vocab_size());
    for (int32_t id : {-1, beyond, 2147483647}) {
      const auto text = tokenizer->decode(std::vector<int32_t>{5, id});
      ASSERT_FALSE(text.ok());
      EXPECT_EQ(text.status().code(), Code::kInvalidArgument);
      EXPECT_NE(text.status().message().find(concat(id)), std::string::npos);
    }
    EXPECT_TRUE(tokenizer->decode(std::vector<int32_t>{beyond - 1}).ok());
  }
}

TEST(Tokenizer, FindsTheFileInADirectory) {
  const TemporaryDirectory directory;
  EXPECT_EQ(Tokenizer::load(directory.path()).status().code(), Code::kNotFound);
  EXPECT_EQ(Tokenizer::load(directory.file("other")).status().code(), Code::kNotFound);
  testing::write_file(directory.file("tokenizer.model"), "a SentencePiece model");
  for (const std::string& path : {directory.path(), directory.file("tokenizer.model")}) {
    const Status status = Tokenizer::load(path).status();
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_NE(status.message().find("save_pretrained"), std::string::npos) << status.message();
  }
  std::filesystem::copy_file(golden_path("gpt2.json"), directory.file("tokenizer.json"));
  EXPECT_EQ((*Tokenizer::load(directory.path()))->hash(),
            hash_of(*read_text_file(Env::posix(), golden_path("gpt2.json"))));
}

// A merge loop that looks at all pairs for each merge would need hours for these.
TEST(Tokenizer, OneVeryLongWord) {
  const auto tokenizer = load_golden("nano");
  for (const char* unit : {"a", " ", "\n", "ab", "\xcc\x81", "="}) {
    std::string text;
    while (text.size() < 200'000) text += unit;
    std::vector<int32_t> ids;
    ASSERT_TRUE(tokenizer->encode(text, false, ids).ok());
    EXPECT_LT(ids.size(), text.size() + 1);
    EXPECT_EQ(*tokenizer->decode(ids), text);
  }
}

TEST(Tokenizer, OneObjectServesSeveralThreads) {
  for (const char* name : {"nano", "qwen2", "llama2"}) {
    const auto tokenizer = load_golden(name);
    const auto texts = golden_texts();
    std::vector<std::vector<int32_t>> ids(4);
    {
      std::vector<std::jthread> threads;
      for (auto& mine : ids) {
        threads.emplace_back([&] {
          for (const auto& text : texts) EXPECT_TRUE(tokenizer->encode(text, true, mine).ok());
        });
      }
    }
    for (const auto& mine : ids) EXPECT_EQ(mine, ids[0]);
    EXPECT_FALSE(ids[0].empty());
  }
}

}  // namespace
}  // namespace sqz
