// SentencePiece models written here: what each rule does, and bad files. The ids of whole models
// are compared in tokenizer_test.cc.
#include "formats/tokenizer_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tests/formats/tokenizer_golden.h"
#include "tests/formats/tokenizer_sentencepiece_file.h"

namespace sqz {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ModelFile;
using testing::ProtobufWriter;
using std::string_literals::operator""s;

class Model {
 public:
  explicit Model(const ModelFile& file) {
    auto loaded = load_sentencepiece(file.str(), "tokenizer.model");
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    if (loaded.ok()) tokenizer_ = std::move(*loaded);
  }
  std::vector<int32_t> ids(std::string_view text) const {
    std::vector<int32_t> out;
    if (tokenizer_ != nullptr) {
      const Status status = tokenizer_->encode(text, false, out);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    return out;
  }
  std::string text(const std::vector<int32_t>& ids, bool keep_special = false) const {
    return *tokenizer_->decode(ids, keep_special);
  }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  std::unique_ptr<Tokenizer> tokenizer_;
};

ModelFile letters() {
  ModelFile file(ModelFile::kBpe);
  return file.add("a", -100).add("b", -100).add("c", -100).add("\u2581", -100);  // 1 2 3 4
}

TEST(SentencePieceBpe, BestScoreFirst) {
  EXPECT_THAT(Model(letters().add("ab", -2).add("bc", -1)).ids("abc"), ElementsAre(1, 6));
  EXPECT_THAT(Model(letters().add("ab", -1).add("bc", -2)).ids("abc"), ElementsAre(5, 3));
}

TEST(SentencePieceBpe, LeftmostOfEqualScores) {
  EXPECT_THAT(Model(letters().add("ab", -1).add("bc", -1)).ids("abc"), ElementsAre(5, 3));
  EXPECT_THAT(Model(letters().add("bc", -1).add("ab", -1)).ids("abc"), ElementsAre(6, 3));
  EXPECT_THAT(Model(letters().add("aa", -1)).ids("aaaaa"), ElementsAre(5, 5, 1));
}

// Both ways to "aba" have the score of "aba": the left pair of "ababa" is joined first.
TEST(SentencePieceBpe, RankIsThatOfTheResult) {
  const Model model(letters().add("aba", -1).add("ab", -2).add("ba", -3));
  EXPECT_THAT(model.ids("ababa"), ElementsAre(5, 7));
  EXPECT_THAT(model.ids("baba"), ElementsAre(2, 5));
}

TEST(SentencePieceBpe, CharactersThatOnlyPiecesHave) {
  const ModelFile file = letters().add("ax", -1).add("xyx", -2).add("xy", -3);
  const Model model(file);
  EXPECT_THAT(model.ids("ax"), ElementsAre(5));
  EXPECT_THAT(model.ids("xyx"), ElementsAre(6));
  EXPECT_THAT(model.ids("bx"), ElementsAre(2, 0));
  EXPECT_THAT(model.ids("yxzb"), ElementsAre(0, 2));  // a run of unknowns is one
  ModelFile with_bytes = file;
  EXPECT_THAT(Model(with_bytes.add_bytes()).ids("bx"), ElementsAre(2, 8 + 'x'));
}

TEST(SentencePieceBpe, UnknownCharacters) {
  EXPECT_THAT(Model(letters()).ids("a\u00e9\u00ebb\u00e9"), ElementsAre(1, 0, 2, 0));
  EXPECT_THAT(Model(letters().add_bytes()).ids("a\u00e9b"), ElementsAre(1, 5 + 0xc3, 5 + 0xa9, 2));
}

TEST(SentencePieceBpe, ControlAndBytePiecesAreNeverMadeFromText) {
  const Model model(
      letters().add("<s>", 0, testing::kControl).add("x", 0, testing::kControl).add_bytes());
  EXPECT_EQ(model.tokenizer().bos_token(), 5);
  EXPECT_THAT(model.ids("x"), ElementsAre(7 + 'x'));
  EXPECT_EQ(model.ids("<s>").size(), 3u);
  EXPECT_EQ(model.ids("<0x41>").size(), 6u);
}

TEST(SentencePieceBpe, UserDefinedPiecesComeFirstAndLongestFirst) {
  const Model model(letters()
                        .add("ab", -1)
                        .add("bb", 0, testing::kUserDefined)
                        .add("bbc", 0, testing::kUserDefined));
  EXPECT_THAT(model.ids("abbc"), ElementsAre(1, 7));
  EXPECT_THAT(model.ids("abbbc"), ElementsAre(1, 6, 2, 3));
  EXPECT_THAT(model.ids("ab"), ElementsAre(5));
}

ModelFile unigram() {
  ModelFile file(ModelFile::kUnigram);
  return file.add("a", -1).add("b", -1).add("ab", -3);  // 1 2 3
}

TEST(SentencePieceUnigram, GreatestSum) {
  EXPECT_THAT(Model(unigram()).ids("ab"), ElementsAre(1, 2));
  EXPECT_THAT(Model(unigram().add("aba", -0.5f)).ids("ababa"), ElementsAre(1, 2, 4));
  EXPECT_THAT(Model(unigram()).ids("axyb"), ElementsAre(1, 0, 2));
  // The unknown piece costs 10 more than the worst piece.
  EXPECT_THAT(Model(unigram().add("xb", -20)).ids("axb"), ElementsAre(1, 4));
  EXPECT_THAT(Model(unigram().add("xy", -9).add("y", -1)).ids("xyb"), ElementsAre(4, 2));
}

TEST(SentencePieceUnigram, UnusedAndUserDefinedPieces) {
  EXPECT_THAT(Model(unigram().add("aa", 0, testing::kUnused)).ids("aa"), ElementsAre(1, 1));
  EXPECT_THAT(Model(unigram().add("bab", -50, testing::kUserDefined)).ids("abab"),
              ElementsAre(1, 4));
}

TEST(SentencePieceNormalizer, WhiteSpace) {
  ModelFile file = letters();
  EXPECT_THAT(Model(file).ids(" a "), ElementsAre(4, 1, 4));
  file.normalizer = ProtobufWriter().varint(3, 1).varint(4, 0);
  EXPECT_THAT(Model(file).ids(" a"), ElementsAre(4, 4, 1));
  EXPECT_THAT(Model(file).ids(""), IsEmpty());
  EXPECT_EQ(Model(file).text({4, 4, 1, 4}), " a ");
  file.normalizer = ProtobufWriter();  // both are on
  EXPECT_THAT(Model(file).ids("  a   b  "), ElementsAre(4, 1, 4, 2));
  EXPECT_THAT(Model(file).ids("   "), IsEmpty());
  EXPECT_EQ(Model(file).text({4, 4, 1, 4}), "a ");
  file.normalizer = ProtobufWriter().varint(3, 0).varint(4, 0).varint(5, 0);
  EXPECT_THAT(Model(file).ids("a b"), ElementsAre(1, 0, 2));
}

// A table with one rule: the byte `key` becomes the replacement at `offset`, "a b" or "c".
ModelFile with_rule(uint32_t offset, char key = 'A', uint32_t root = 256u << 10) {
  std::vector<uint32_t> units(512, 0);
  const auto byte = static_cast<unsigned char>(key);
  const uint32_t at = 256u ^ byte;
  units[0] = root;
  units[at] = byte | 1u << 8 | (at ^ 2u) << 10;  // the leaf is unit 2
  units[2] = 0x80000000u | offset;
  std::string table{"\0\x08\0\0"s};  // 2048 bytes
  for (uint32_t unit : units) {
    for (int shift = 0; shift < 32; shift += 8) table.push_back(static_cast<char>(unit >> shift));
  }
  ModelFile file = letters();
  file.normalizer.bytes(2, table + "a b\0c\0"s);
  return file;
}

TEST(SentencePieceNormalizer, RulesOfTheTable) {
  EXPECT_THAT(Model(with_rule(0)).ids("cAb"), ElementsAre(3, 1, 4, 2, 2));
  EXPECT_THAT(Model(with_rule(4)).ids("AcA"), ElementsAre(3, 3, 3));
  EXPECT_THAT(Model(with_rule(3)).ids("AcA"), ElementsAre(3));  // to nothing
}

TEST(SentencePieceNormalizer, RulesThatLeadOutOfTheTable) {
  EXPECT_THAT(Model(with_rule(0x7fffffff)).ids("Ab"), ElementsAre(0, 2));
  EXPECT_THAT(Model(with_rule(0, 'A', 0xffffffff)).ids("Ab"), ElementsAre(0, 2));
}

TEST(SentencePieceNormalizer, RulesThatCutCharacters) {
  const Model model(with_rule(0, '\xc3'));
  std::vector<int32_t> ids{7};
  const Status status = model.tokenizer().encode("a\u00e9", true, ids);
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("tokenizer.model: normalizer_spec.precompiled_charsmap"));
  EXPECT_THAT(ids, ElementsAre(7));
}

TEST(SentencePieceDecode, SurfacesOfPieces) {
  ModelFile file = letters().add("<s>", 0, testing::kControl).add_bytes();
  const Model model(file);
  EXPECT_EQ(model.text({5, 4, 1, 0, 5}), " a \u2047 ");
  EXPECT_EQ(model.text({5, 4, 1, 0, 5}, true), "<s> a \u2047 <s>");
  const auto byte = [](int value) { return 6 + value; };
  EXPECT_EQ(model.text({byte(0xc3), byte(0xa9), byte(0xc3), 1, byte(0xed), byte(0xa0)}),
            "\u00e9\ufffda\ufffd\ufffd");
  file.trainer.bytes(44, "?");
  EXPECT_EQ(Model(file).text({0, 0}), "??");
}

struct MalformedModel {
  const char* name;
  std::function<std::string()> make;
  Code code;
  const char* message;
};

std::string with(const std::function<void(ModelFile&)>& change) {
  ModelFile file = letters();
  change(file);
  return file.str();
}
std::string with_piece(std::string_view text, float score = 0, int type = testing::kNormal) {
  return with(
      [&](ModelFile& file) { file.add(text, score, static_cast<testing::PieceType>(type)); });
}
std::string with_raw_piece(const ProtobufWriter& piece) {
  return with([&](ModelFile& file) { file.pieces.bytes(1, piece.str()); });
}
std::string with_charsmap(std::string_view table) {
  return with([&](ModelFile& file) { file.normalizer.bytes(2, table); });
}
std::string with_kind(uint64_t kind) {
  return with([&](ModelFile& file) { file.trainer.varint(3, kind); });
}
std::string with_trainer(uint32_t field, uint64_t value) {
  return with([&](ModelFile& file) { file.trainer.varint(field, value); });
}

const MalformedModel kMalformedModels[] = {
    {"no_pieces", [] { return ProtobufWriter().bytes(2, "").bytes(3, "").str(); }, Code::kCorrupt,
     "content: found no vocabulary"},
    {"no_trainer", [] { return letters().pieces.str() + ProtobufWriter().bytes(3, "").str(); },
     Code::kCorrupt, "content: found no trainer_spec"},
    {"no_normalizer", [] { return letters().pieces.str() + ProtobufWriter().bytes(2, "").str(); },
     Code::kCorrupt, "content: found no normalizer_spec"},
    {"no_unknown",
     [] {
       ModelFile file(ModelFile::kBpe);
       file.pieces = ProtobufWriter();
       return file.add("a", 0).str();
     },
     Code::kCorrupt, "pieces: found no unknown piece"},
    {"two_unknown", [] { return with_piece("?", 0, 2); }, Code::kCorrupt,
     "pieces[5].type: found a second unknown piece"},
    {"empty_piece", [] { return with_piece(""); }, Code::kCorrupt,
     "pieces[5].piece: found nothing"},
    {"missing_piece", [] { return with_raw_piece(ProtobufWriter().number(2, 1)); }, Code::kCorrupt,
     "pieces[5].piece: found nothing"},
    {"duplicate", [] { return with_piece("b"); }, Code::kCorrupt, "but pieces[2] is the same"},
    {"duplicate_of_another_type", [] { return with_piece("<unk>"); }, Code::kCorrupt,
     "but pieces[0] is the same"},
    {"not_utf8", [] { return with_piece("ab\xe2\x82"); }, Code::kCorrupt, "UTF-8 at byte 2"},
    {"nan", [] { return with_piece("x", std::numeric_limits<float>::quiet_NaN()); }, Code::kCorrupt,
     "pieces[5].score: found nan"},
    {"infinite", [] { return with_piece("x", -std::numeric_limits<float>::infinity()); },
     Code::kCorrupt, "pieces[5].score: found -inf"},
    {"type_0", [] { return with_piece("x", 0, 0); }, Code::kCorrupt, "pieces[5].type: found 0"},
    {"type_7", [] { return with_piece("x", 0, 7); }, Code::kCorrupt, "pieces[5].type: found 7"},
    {"type_huge",
     [] { return with_raw_piece(ProtobufWriter().bytes(1, "x").varint(3, ~0ull >> 1)); },
     Code::kCorrupt, "expected a number of 32 bits"},
    {"unused_in_bpe", [] { return with_piece("x", 0, 5); }, Code::kUnsupported, "unused pieces"},
    {"long_piece", [] { return with_piece(std::string(2000, 'x')); }, Code::kUnsupported,
     "pieces[5].piece: 2000 bytes"},
    {"byte_without_fallback", [] { return with_piece("<0x41>", 0, 6); }, Code::kCorrupt,
     "because trainer_spec.byte_fallback is false"},
    {"byte_missing", [] { return with_trainer(35, 1); }, Code::kCorrupt, "no piece for byte 0"},
    {"byte_misspelt",
     [] { return with([](ModelFile& f) { f.add_bytes().add("<0x4G>", 0, testing::kByte); }); },
     Code::kCorrupt, "found \"<0x4G>\", expected a byte"},
    {"model_word", [] { return with_kind(3); }, Code::kUnsupported,
     "model type 3 is not supported, 1 (unigram) and 2 (BPE) are; a tokenizer.json"},
    {"model_0", [] { return with_kind(0); }, Code::kUnsupported, "model type 0"},
    {"suffix", [] { return with_trainer(24, 1); }, Code::kUnsupported, "white space as a suffix"},
    {"denormalizer",
     [] {
       return letters().str() +
              ProtobufWriter().bytes(5, ProtobufWriter().bytes(2, "x").str()).str();
     },
     Code::kUnsupported, "denormalizer_spec"},
    {"unk_id", [] { return with_trainer(40, 5); }, Code::kCorrupt, "unk_id: found 5"},
    {"bos_id", [] { return with_trainer(41, 1 << 30); }, Code::kCorrupt,
     "bos_id: found 1073741824"},
    {"eos_id", [] { return with_trainer(42, static_cast<uint64_t>(-2)); }, Code::kCorrupt,
     "eos_id: found -2"},
    {"trainer_as_number", [] { return letters().str() + ProtobufWriter().varint(2, 1).str(); },
     Code::kCorrupt, "trainer_spec: found wire type 0, expected wire type 2"},
    {"pieces_as_number", [] { return letters().str() + ProtobufWriter().varint(1, 1).str(); },
     Code::kCorrupt, "pieces: found wire type 0"},
    {"score_as_number", [] { return with_raw_piece(ProtobufWriter().bytes(1, "x").varint(2, 1)); },
     Code::kCorrupt, "pieces[5].score: found wire type 0, expected wire type 5"},
    {"text_as_float", [] { return with_raw_piece(ProtobufWriter().number(1, 1)); }, Code::kCorrupt,
     "pieces[5].piece: found wire type 5"},
    {"flag_as_text", [] { return with([](ModelFile& f) { f.trainer.bytes(35, "yes"); }); },
     Code::kCorrupt, "trainer_spec.byte_fallback: found wire type 2"},
    {"group", [] { return letters().str() + "\x33"; }, Code::kCorrupt, "wire type 3 of field 6"},
    {"field_0", [] { return letters().str() + "\x02\x01x"; }, Code::kCorrupt, "field number 0"},
    {"length_beyond_end", [] { return letters().str() + "\x32\xff\xff\xff\xff\x0f"; },
     Code::kCorrupt, "a field of 4294967295 bytes where 0 follow"},
    {"length_of_64_bits",
     [] { return letters().str() + "\x32\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"; },
     Code::kCorrupt, "a field of 18446744073709551615 bytes"},
    {"length_beyond_piece", [] { return with_raw_piece(ProtobufWriter().raw("\x0a\x05xy")); },
     Code::kCorrupt, "a field of 5 bytes where 2 follow"},
    {"endless_number", [] { return letters().str() + "\x30" + std::string(11, '\xff'); },
     Code::kCorrupt, "a number of more than 64 bits"},
    {"charsmap_short", [] { return with_charsmap("\4\0\0\0"s); }, Code::kCorrupt,
     "precompiled_charsmap: found 4 bytes"},
    {"charsmap_no_trie", [] { return with_charsmap("\0\0\0\0x\0"s); }, Code::kCorrupt,
     "a trie of 0 bytes"},
    {"charsmap_odd", [] { return with_charsmap("\3\0\0\0abcd\0"s); }, Code::kCorrupt,
     "a trie of 3 bytes"},
    {"charsmap_long_trie",
     [] {
       return with_charsmap(
           "\xff\xff\xff\xff"
           "abcd\0"s);
     },
     Code::kCorrupt, "a trie of 4294967295 bytes"},
    {"charsmap_not_utf8", [] { return with_charsmap("\4\0\0\0abcd\xff\0"s); }, Code::kCorrupt,
     "invalid UTF-8 at byte 0"},
    {"charsmap_no_end", [] { return with_charsmap("\4\0\0\0abcdx"s); }, Code::kCorrupt,
     "no zero byte"},
};

void PrintTo(const MalformedModel& malformed, std::ostream* out) {
  *out << malformed.name;
}

class MalformedSentencePiece : public ::testing::TestWithParam<MalformedModel> {};

TEST_P(MalformedSentencePiece, IsRefused) {
  const Status status = load_sentencepiece(GetParam().make(), "tokenizer.model").status();
  EXPECT_EQ(status.code(), GetParam().code) << status.message();
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("tokenizer.model: "), HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(Files, MalformedSentencePiece, ::testing::ValuesIn(kMalformedModels),
                         [](const auto& param_info) { return param_info.param.name; });

TEST(SentencePieceFile, UnknownFieldsAreSkipped) {
  ModelFile file = letters();
  file.trainer.varint(77, 1).bytes(78, "x").number(79, 1).raw("\x81\x05" + std::string(8, 'x'));
  EXPECT_THAT(Model(file).ids("ab"), ElementsAre(1, 2));
}

TEST(SentencePieceFile, EveryTruncationIsRefused) {
  const std::string good = letters().add_bytes().add("<s>", 0, testing::kControl).str();
  ASSERT_TRUE(load_sentencepiece(good, "tokenizer.model").ok());
  for (size_t length = 0; length < good.size(); ++length) {
    const Status status = load_sentencepiece(good.substr(0, length), "tokenizer.model").status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << length << ": " << status.message();
  }
}

// Loads `bytes`; if it loads, it encodes and decodes. The sanitizers watch.
bool survives(const std::string& bytes) {
  const auto tokenizer = load_sentencepiece(bytes, "tokenizer.model");
  if (!tokenizer.ok()) return false;
  std::vector<int32_t> ids;
  if ((*tokenizer)->encode("ab \u00e9 \uff21\ufb01 abcab", true, ids).ok()) {
    EXPECT_TRUE((*tokenizer)->decode(ids, true).ok());
  }
  return true;
}

TEST(SentencePieceFile, EveryFlippedBitIsHandled) {
  for (const ModelFile::Kind kind : {ModelFile::kUnigram, ModelFile::kBpe}) {
    ModelFile file(kind);
    file.add("a", -2).add("ab", -1).add("c", -3, testing::kUserDefined);
    const std::string good = file.str();
    for (size_t i = 0; i < 8 * good.size(); ++i) {
      std::string text = good;
      text[i / 8] = static_cast<char>(text[i / 8] ^ (1 << i % 8));
      survives(text);
    }
    EXPECT_TRUE(survives(good));
  }
}

// The table of a real model with bytes of its trie changed: rules that lead anywhere.
TEST(SentencePieceFile, DamagedTablesAreHandled) {
  const std::string model =
      *read_text_file(Env::posix(), testing::golden_path("spm_unigram.model"));
  size_t loaded = 0;
  uint32_t random = 1;
  for (int round = 0; round < 60; ++round) {
    std::string damaged = model;
    for (int i = 0; i < 2000; ++i) {
      random = random * 1664525 + 1013904223;
      damaged[damaged.size() / 4 + (random >> 8) % (damaged.size() / 4)] =
          static_cast<char>(random >> 3);
    }
    loaded += survives(damaged) ? 1 : 0;
  }
  EXPECT_GT(loaded, 30u);
}

}  // namespace
}  // namespace sqz
