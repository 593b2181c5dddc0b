#include "formats/sentencepiece_model.h"

#include <bit>
#include <cmath>

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr char kExpected[] = "a SentencePiece model";
constexpr size_t kLargestModel = size_t{64} << 20;  // the largest that is known has 5 MB
// Every way to cut a piece in two is tried: quadratic in its length.
constexpr size_t kLongestPiece = 1024;
constexpr char kRemedy[] = "a tokenizer.json of the same tokenizer would work";

// A field of a protobuf message, as the wire has it.
struct Field {
  // The values are those of the wire. Groups (3 and 4) are refused: nothing writes them any more.
  enum class Type : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  uint32_t number = 0;
  Type type = Type::kVarint;
  uint64_t value = 0;      // of a varint or a fixed number, as it stands
  std::string_view bytes;  // of kBytes: inside the file
};

// One message's fields, one after the other, nothing trusted: kCorrupt for what breaks the format,
// such as a number of more than 64 bits, a length beyond the end, field number 0, an unknown type.
class MessageReader {
 public:
  MessageReader(std::string_view message, const std::string& path)
      : message_(message), path_(path) {}

  bool at_end() const { return offset_ == message_.size(); }

  Status next(Field& field) {
    uint64_t tag = 0;
    SQZ_RETURN_IF_ERROR(read_varint(tag));
    constexpr uint64_t kLargestNumber = (uint64_t{1} << 29) - 1;
    if (tag >> 3 == 0 || tag >> 3 > kLargestNumber) return bad(concat("field number ", tag >> 3));
    field = {static_cast<uint32_t>(tag >> 3), static_cast<Field::Type>(tag & 7), 0, {}};
    using Type = Field::Type;
    return field.type == Type::kVarint    ? read_varint(field.value)
           : field.type == Type::kFixed64 ? read_fixed(8, field.value)
           : field.type == Type::kFixed32 ? read_fixed(4, field.value)
           : field.type == Type::kBytes
               ? read_bytes(field.bytes)
               : bad(concat("wire type ", tag & 7, " of field ", field.number));
  }

 private:
  Status bad(std::string_view found) const { return Refuse{path_}("content", found, kExpected); }

  Status read_varint(uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; offset_ < message_.size(); shift += 7) {
      const auto byte = static_cast<unsigned char>(message_[offset_++]);
      // The tenth byte has room for one bit.
      if (shift == 63 && byte > 1) return bad("a number of more than 64 bits");
      value |= uint64_t{byte & 0x7fu} << shift;
      if ((byte & 0x80u) == 0) return {};
    }
    return bad("an end within a number");
  }

  Status read_fixed(size_t size, uint64_t& value) {
    if (message_.size() - offset_ < size) return bad("an end within a number");
    value = 0;
    for (size_t i = 0; i < size; ++i) {
      value |= uint64_t{static_cast<unsigned char>(message_[offset_ + i])} << (8 * i);
    }
    offset_ += size;
    return {};
  }

  Status read_bytes(std::string_view& bytes) {
    uint64_t length = 0;
    SQZ_RETURN_IF_ERROR(read_varint(length));
    if (length > message_.size() - offset_) {
      return bad(
          concat("a field of ", length, " bytes where ", message_.size() - offset_, " follow"));
    }
    bytes = message_.substr(offset_, length);
    offset_ += length;
    return {};
  }

  std::string_view message_;
  const std::string& path_;
  size_t offset_ = 0;
};

class ModelParser {
 public:
  explicit ModelParser(const std::string& path) : path_(path) {}

  Result<SentencePieceModel> parse(std::string_view bytes) {
    // An empty message is a legal protobuf.
    if (bytes.empty()) return corrupt("content", "an empty file", kExpected);
    if (bytes.size() > kLargestModel) {
      return unsupported(
          "content", concat(bytes.size(), " bytes, of which ", kLargestModel, " are supported"));
    }
    SQZ_RETURN_IF_ERROR(each_field(bytes, [&](const Field& field) { return read_model(field); }));
    // The format calls both optional, but every model has them, and a file that was cut off has
    // not.
    if (!has_trainer_) return corrupt("content", "no trainer_spec", kExpected);
    if (!has_normalizer_) return corrupt("content", "no normalizer_spec", kExpected);
    SQZ_RETURN_IF_ERROR(check_pieces());
    SQZ_RETURN_IF_ERROR(check_trainer());
    model_.kind = static_cast<SentencePieceModel::Kind>(kind_);
    const auto bos = model_.ids.find(bos_piece_.empty() ? std::string("<s>") : bos_piece_);
    if (bos != model_.ids.end() &&
        model_.pieces[static_cast<size_t>(bos->second)].type == SentencePiece::Type::kControl) {
      model_.bos = bos->second;
    }
    return std::move(model_);
  }

 private:
  Status corrupt(std::string_view field, std::string_view found, std::string_view expected) const {
    return Refuse{path_}(field, found, expected);
  }
  Status unsupported(std::string_view field, std::string_view what) const {
    return {Code::kUnsupported, concat(path_, ": ", field, ": ", what, "; ", kRemedy)};
  }

  // Calls `read(field)` for each field of `message`.
  template <class Read>
  Status each_field(std::string_view message, Read read) const {
    MessageReader reader(message, path_);
    for (Field field; !reader.at_end();) {
      SQZ_RETURN_IF_ERROR(reader.next(field));
      SQZ_RETURN_IF_ERROR(read(field));
    }
    return {};
  }

  Status expect(const Field& field, Field::Type type, std::string_view name) const {
    if (field.type == type) return {};
    return corrupt(name, concat("wire type ", static_cast<int>(field.type)),
                   concat("wire type ", static_cast<int>(type)));
  }

  template <class T>
  Status read(const Field& field, std::string_view name, T& out) const {
    if constexpr (std::is_same_v<T, std::string>) {
      SQZ_RETURN_IF_ERROR(expect(field, Field::Type::kBytes, name));
      out = field.bytes;
    } else if constexpr (std::is_same_v<T, float>) {
      SQZ_RETURN_IF_ERROR(expect(field, Field::Type::kFixed32, name));
      out = std::bit_cast<float>(static_cast<uint32_t>(field.value));
    } else {
      SQZ_RETURN_IF_ERROR(expect(field, Field::Type::kVarint, name));
      const auto value = static_cast<int64_t>(field.value);
      if (!std::is_same_v<T, bool> && !std::in_range<int32_t>(value)) {
        return corrupt(name, concat(value), "a number of 32 bits");
      }
      out = std::is_same_v<T, bool> ? value != 0 : static_cast<T>(value);
    }
    return {};
  }

  Status read_piece(std::string_view message) {
    const std::string name = concat("pieces[", model_.pieces.size(), ']');
    SentencePiece piece;
    auto type = static_cast<int32_t>(SentencePiece::Type::kNormal);
    SQZ_RETURN_IF_ERROR(each_field(message, [&](const Field& field) -> Status {
      if (field.number == 1) return read(field, name + ".piece", piece.text);
      if (field.number == 2) return read(field, name + ".score", piece.score);
      if (field.number == 3) return read(field, name + ".type", type);
      return {};
    }));
    if (type < 1 || type > 6) return corrupt(name + ".type", concat(type), "1 to 6");
    piece.type = static_cast<SentencePiece::Type>(type);
    model_.pieces.push_back(std::move(piece));
    return {};
  }

  Status read_trainer(const Field& field) {
    const auto into = [&](const char* name, auto& out) {
      return read(field, concat("trainer_spec.", name), out);
    };
    if (field.number == 3) return into("model_type", kind_);
    if (field.number == 24) return into("treat_whitespace_as_suffix", suffix_);
    if (field.number == 35) return into("byte_fallback", model_.byte_fallback);
    if (field.number == 40) return into("unk_id", unk_id_);
    if (field.number == 41) return into("bos_id", bos_id_);
    if (field.number == 42) return into("eos_id", eos_id_);
    if (field.number == 44) return into("unk_surface", model_.unk_surface);
    if (field.number == 46) return into("bos_piece", bos_piece_);
    return {};
  }

  Status read_normalizer(const Field& field) {
    const auto into = [&](const char* name, auto& out) {
      return read(field, concat("normalizer_spec.", name), out);
    };
    if (field.number == 2) return into("precompiled_charsmap", model_.charsmap);
    if (field.number == 3) return into("add_dummy_prefix", model_.add_dummy_prefix);
    if (field.number == 4) return into("remove_extra_whitespaces", model_.remove_extra_whitespaces);
    if (field.number == 5) return into("escape_whitespaces", model_.escape_whitespaces);
    return {};
  }

  Status read_denormalizer(const Field& field) {
    if (field.number != 2 || field.bytes.empty()) return {};
    return unsupported("denormalizer_spec", "rules for decoded text are not supported");
  }

  Status read_model(const Field& field) {
    constexpr const char* kNames[] = {"", "pieces",           "trainer_spec", "normalizer_spec",
                                      "", "denormalizer_spec"};
    const uint32_t number = field.number;
    if (number == 4 || number >= std::size(kNames)) return {};
    SQZ_RETURN_IF_ERROR(expect(field, Field::Type::kBytes, kNames[number]));
    has_trainer_ |= number == 2;
    has_normalizer_ |= number == 3;
    if (number == 1) return read_piece(field.bytes);
    return each_field(field.bytes, [&](const Field& inner) {
      return number == 2   ? read_trainer(inner)
             : number == 3 ? read_normalizer(inner)
                           : read_denormalizer(inner);
    });
  }

  Status check_byte_piece(size_t id) {
    const std::string& text = model_.pieces[id].text;
    const std::string name = concat("pieces[", id, "].piece");
    if (!model_.byte_fallback) {
      return corrupt(name, concat("the byte piece ", quote_text(text)),
                     "none, because trainer_spec.byte_fallback is false");
    }
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    const auto digit = [&](size_t i) { return kDigits.find(text[i]); };
    if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>' || digit(3) > 15 ||
        digit(4) > 15) {
      return corrupt(name, quote_text(text), "a byte as \"<0x0A>\"");
    }
    model_.byte_ids[digit(3) << 4 | digit(4)] = static_cast<int32_t>(id);
    return {};
  }

  Status check_piece(size_t id) {
    const SentencePiece& piece = model_.pieces[id];
    const std::string name = concat("pieces[", id, ']');
    if (piece.text.empty()) return corrupt(name + ".piece", "nothing", "at least one character");
    if (piece.text.size() > kLongestPiece) {
      return unsupported(name + ".piece", concat(piece.text.size(), " bytes, of which ",
                                                 kLongestPiece, " are supported"));
    }
    if (const auto offset = find_invalid_utf8(piece.text)) {
      return corrupt(name + ".piece", concat("invalid UTF-8 at byte ", *offset), "valid UTF-8");
    }
    if (!std::isfinite(piece.score)) {
      return corrupt(name + ".score", concat(piece.score), "a finite number");
    }
    const auto [other, fresh] = model_.ids.emplace(piece.text, static_cast<int32_t>(id));
    if (!fresh) {
      return corrupt(name + ".piece", quote_text(piece.text),
                     concat("a piece of its own, but pieces[", other->second, "] is the same"));
    }
    if (piece.type == SentencePiece::Type::kByte) return check_byte_piece(id);
    if (piece.type == SentencePiece::Type::kUnknown) {
      if (model_.unk >= 0) {
        return corrupt(name + ".type", "a second unknown piece",
                       concat("pieces[", model_.unk, "] alone"));
      }
      model_.unk = static_cast<int32_t>(id);
    }
    if (piece.type == SentencePiece::Type::kUnused && kind_ == 2) {
      return unsupported(name + ".type", "unused pieces of a BPE model are not supported");
    }
    return {};
  }

  Status check_pieces() {
    if (model_.pieces.empty()) return corrupt("content", "no vocabulary", kExpected);
    model_.byte_ids.fill(-1);
    model_.ids.reserve(model_.pieces.size());
    for (size_t id = 0; id < model_.pieces.size(); ++id) SQZ_RETURN_IF_ERROR(check_piece(id));
    if (model_.unk < 0) return corrupt("pieces", "no unknown piece", "one");
    for (size_t byte = 0; model_.byte_fallback && byte < model_.byte_ids.size(); ++byte) {
      if (model_.byte_ids[byte] < 0) {
        return corrupt("pieces", concat("no piece for byte ", byte),
                       "256 of them, because trainer_spec.byte_fallback is true");
      }
    }
    return {};
  }

  Status check_trainer() {
    if (kind_ != 1 && kind_ != 2) {
      return unsupported(
          "trainer_spec.model_type",
          concat("model type ", kind_, " is not supported, 1 (unigram) and 2 (BPE) are"));
    }
    if (suffix_) {
      return unsupported("trainer_spec.treat_whitespace_as_suffix",
                         "white space as a suffix is not supported");
    }
    const auto count = static_cast<int64_t>(model_.pieces.size());
    const std::pair<const char*, int32_t> ids[] = {
        {"unk_id", unk_id_}, {"bos_id", bos_id_}, {"eos_id", eos_id_}};
    for (const auto& [name, id] : ids) {
      if (id < -1 || id >= count) {
        return corrupt(concat("trainer_spec.", name), concat(id),
                       concat("-1 or an id below ", count));
      }
    }
    return {};
  }

  const std::string& path_;
  SentencePieceModel model_;
  int32_t kind_ = static_cast<int32_t>(SentencePieceModel::Kind::kUnigram);
  int32_t unk_id_ = 0;
  int32_t bos_id_ = 1;
  int32_t eos_id_ = 2;
  bool suffix_ = false;
  std::string bos_piece_;
  bool has_trainer_ = false;
  bool has_normalizer_ = false;
};

}  // namespace

void SentencePieceModel::append_unknown(std::string_view text, std::vector<int32_t>& out) const {
  if (byte_fallback) {
    for (char byte : text) out.push_back(byte_ids[static_cast<unsigned char>(byte)]);
  } else if (out.empty() || out.back() != unk) {
    out.push_back(unk);
  }
}

Result<SentencePieceModel> parse_sentencepiece_model(std::string_view bytes,
                                                     const std::string& path) {
  return ModelParser(path).parse(bytes);
}

}  // namespace sqz
