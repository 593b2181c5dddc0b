// SentencePiece's tokenizer.model: the pieces, and how text becomes pieces.
//
// The file is a protobuf message (ModelProto of sentencepiece_model.proto). Fields that do not bear
// on encoding and decoding, such as the trainer's settings, are skipped.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

struct SentencePiece {
  // The values are those of the file.
  enum class Type : uint8_t {
    kNormal = 1,
    kUnknown = 2,      // stands for what no piece covers
    kControl = 3,      // <s>, </s>: never made from text
    kUserDefined = 4,  // found in the text before anything else, never cut
    kUnused = 5,       // never made from text
    kByte = 6,         // <0x00> to <0xFF>, for characters without a piece
  };
  std::string text;  // not empty, valid UTF-8, no other piece has it
  float score = 0;   // finite
  Type type = Type::kNormal;
};

struct SentencePieceModel {
  enum class Kind : uint8_t { kUnigram = 1, kBpe = 2 };  // as in the file

  std::vector<SentencePiece> pieces;  // the index is the id
  TokenMap<int32_t> ids;              // of the pieces' texts
  Kind kind = Kind::kUnigram;
  int32_t unk = -1;                      // the one piece of type kUnknown
  std::optional<int32_t> bos;            // if it is a control piece
  std::string unk_surface = " \u2047 ";  // what the unknown piece decodes to
  bool byte_fallback = false;
  std::array<int32_t, 256> byte_ids{};  // with byte_fallback all are there

  // The normaliser's settings; the defaults are the format's.
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;  // a space becomes U+2581
  std::string charsmap;            // see sentencepiece_normalizer.h; empty: identity

  // Appends what stands for `text`, characters without a piece: their bytes, or the unknown piece
  // once for everything unknown that is adjacent.
  void append_unknown(std::string_view text, std::vector<int32_t>& out) const;
};

// `bytes` is the file's content and `path` its name in messages. What is well-formed but not done
// here is kUnsupported: models of words and of characters, white space as a suffix,
// denormalisation, unused pieces in BPE models, pieces of more than 1 KiB, files of more than 64
// MiB.
Result<SentencePieceModel> parse_sentencepiece_model(std::string_view bytes,
                                                     const std::string& path);

}  // namespace sqz
