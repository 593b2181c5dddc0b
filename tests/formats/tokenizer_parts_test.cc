// The parts under the tokenizer that goldens alone would not pin down.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/tokenizer_regex.h"
#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"
#include "tests/common/must.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  auto regex = must(Regex::compile(pattern, "test"));
  RegexMatcher matcher(regex);
  matcher.reset(text);
  std::vector<std::string> found;
  while (const auto match = *matcher.next()) {
    found.emplace_back(text.substr(match->begin, match->end - match->begin));
  }
  return found;
}

TEST(Utf8, EveryCodePointSurvives) {
  for (uint32_t code = 0; code <= 0x10ffff; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string text;
    append_utf8(code, text);
    ASSERT_FALSE(find_invalid_utf8(text)) << code;
    size_t offset = 0;
    ASSERT_EQ(next_char(text, offset), code);
    ASSERT_EQ(offset, text.size());
  }
}

TEST(Utf8, SurrogatesAndWhatLiesBeyondAreInvalid) {
  for (uint32_t code = 0xd800; code < 0xe000; ++code) {
    std::string text;
    append_utf8(code, text);
    ASSERT_EQ(find_invalid_utf8("ok" + text), 2u);
  }
  std::string beyond;
  append_utf8(0x110000, beyond);
  EXPECT_EQ(find_invalid_utf8(beyond), 0u);
}

// Every cut of a character is invalid where the character begins, wherever it lies relative to the
// eight bytes that are looked at together.
TEST(Utf8, OffsetOfACutCharacter) {
  for (const std::string character : {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {
    for (size_t before = 0; before < 20; ++before) {
      for (size_t keep = 1; keep < character.size(); ++keep) {
        const std::string head = std::string(before, 'x') + character.substr(0, keep);
        EXPECT_EQ(find_invalid_utf8(head), before);
        EXPECT_EQ(find_invalid_utf8(head + "yyyyyyyyyyyy"), before);
      }
    }
  }
}

// The examples of the Unicode standard, section 3.9, tables 3-8 to 3-11.
TEST(Utf8, LossyReplacesMaximalSubparts) {
  const std::string r = "\xef\xbf\xbd";
  EXPECT_EQ(utf8_lossy("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8_lossy("\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8_lossy("\xf4\x91\x92\x93\xff\x41\x80\xbf\x42"),
            r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(utf8_lossy("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41"), r + r + r + r + "A");
}

TEST(Regex, EmptyMatchesAdvanceByCharacters) {
  EXPECT_THAT(matches("b*", "\u00e9b"), ElementsAre("", "b"));
  EXPECT_THAT(matches("x*", ""), ElementsAre(""));
}

TEST(Regex, LeavesOutWhatDiffers) {
  EXPECT_EQ(*translate_pattern("a{1,3}[\\-\\p{Lt}]", "test"), "a{1,3}[\\-\\p{Lt}]");
  for (const char* pattern :
       {"(?i)a",         "a(?i)b", "\\w",     "\\h",     "\\K",     "[[:alpha:]]",
        "[a&&b]",        "[]a]",   "(?<n>a)", "(?~a)",   "a{2}?",   "a{2}+",
        "a{,3}",         "\\",     "\\p",     "\\p{Mn}", "\\p{^L}", "[\\P{L}]",
        "\\p{Hiragana}", "[\\S]",  "(?",      "{",       "\\u00e9"}) {
    EXPECT_EQ(translate_pattern(pattern, "test").status().code(), Code::kUnsupported) << pattern;
  }
}

// Characters that Debian 12's PCRE2 does not know, and those that it knows by other properties.
TEST(Regex, PropertiesAreThoseOfTokenizers) {
  const std::string text = "\U0002ebf0\u0897\U00010d40\u1b4e\u2427\u4e00\u3002";
  EXPECT_THAT(matches("\\p{Lo}|\\p{Lu}", text), ElementsAre("\U0002ebf0", "\u4e00"));
  EXPECT_THAT(matches("[\\p{Lm}\\p{M}]+", text), ElementsAre("\u0897"));
  EXPECT_THAT(matches("\\d", text), ElementsAre("\U00010d40"));
  EXPECT_THAT(matches("[\\d]", text), ElementsAre("\U00010d40"));
  EXPECT_THAT(matches("\\p{P}", text), ElementsAre("\u1b4e", "\u3002"));
  EXPECT_THAT(matches("\\p{S}", text), ElementsAre("\u2427"));
  EXPECT_THAT(matches("\\P{L}+", text), ElementsAre("\u0897\U00010d40\u1b4e\u2427", "\u3002"));
  EXPECT_THAT(matches("\\p{Han}+", text), ElementsAre("\U0002ebf0", "\u4e00"));
}

// Deep enough to fill the JIT's stack; the interpreter takes over.
TEST(Regex, LongMatchOfAGroup) {
  const std::string text(4'000'000, 'a');
  EXPECT_THAT(matches("(?:a|b)+?(?!.)", text), ElementsAre(text));
}

TEST(Regex, BacktrackingWithoutEndIsAnError) {
  const auto regex = must(Regex::compile("(?:a|aa|aaa)+b", "test"));
  RegexMatcher matcher(regex);
  const std::string text = std::string(200, 'a') + "cb";
  matcher.reset(text);
  const auto match = matcher.next();
  ASSERT_FALSE(match.ok());
  EXPECT_EQ(match.status().code(), Code::kUnsupported);
  EXPECT_THAT(match.status().message(), ::testing::HasSubstr("match limit"));
}

std::string nfc(std::string text) {
  normalize_nfc(text);
  return text;
}

TEST(Normalizer, SortsLongRunsOfMarks) {
  std::string text = "a";
  std::string sorted = "a";
  for (int i = 0; i < 200000; ++i) text += i % 2 ? "\u0316" : "\u0315";
  for (int i = 0; i < 100000; ++i) sorted += "\u0316";
  for (int i = 0; i < 100000; ++i) sorted += "\u0315";
  EXPECT_EQ(nfc(text), sorted);
}

std::string decoded(const char* step, std::vector<std::string> tokens) {
  const auto json = parse_json(step, "test");
  std::vector<Decoder> decoders;
  EXPECT_TRUE(parse_decoder(JsonFields(json->root(), "test"), decoders).ok());
  for (const Decoder& decode : decoders) decode(tokens);
  std::string out;
  for (const std::string& token : tokens) out += token + "|";
  return out;
}

TEST(Decoders, BytesThatFormNoTextBecomeOneReplacementEach) {
  EXPECT_EQ(decoded(R"({"type": "ByteFallback"})", {"<0xE2>", "<0x82>", "<0xAC>", "a", "<0xE2>",
                                                    "<0x82>", "b", "<0xZZ>", "<0x41>"}),
            "\u20ac|a|\ufffd|\ufffd|b|<0xZZ>|A|");
}

TEST(Decoders, ATokenThatIsNotByteLevelIsItself) {
  EXPECT_EQ(
      decoded(R"({"type": "ByteLevel"})", {"\u0120a", "b\u2581", "\u00c3", "\u00a9", "\u00c3"}),
      " ab\u2581\u00e9\ufffd|");
}

}  // namespace
}  // namespace sqz
