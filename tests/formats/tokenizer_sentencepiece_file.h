// Writes tokenizer.model files for tests, field by field, so that each can be wrong.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace sqz::testing {

class ProtobufWriter {
 public:
  ProtobufWriter& varint(uint32_t field, uint64_t value) {
    put(uint64_t{field} << 3);
    put(value);
    return *this;
  }
  ProtobufWriter& bytes(uint32_t field, std::string_view value) {
    put(uint64_t{field} << 3 | 2);
    put(value.size());
    return raw(value);
  }
  ProtobufWriter& number(uint32_t field, float value) {
    put(uint64_t{field} << 3 | 5);
    char four[4];
    std::memcpy(four, &value, sizeof(four));
    return raw(std::string_view(four, sizeof(four)));
  }
  ProtobufWriter& raw(std::string_view bytes) {
    out_ += bytes;
    return *this;
  }
  const std::string& str() const { return out_; }

 private:
  void put(uint64_t value) {
    for (; value > 127; value >>= 7) out_.push_back(static_cast<char>(value | 128));
    out_.push_back(static_cast<char>(value));
  }
  std::string out_;
};

enum PieceType { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

struct ModelFile {
  enum Kind { kUnigram = 1, kBpe = 2 };

  ProtobufWriter pieces;
  ProtobufWriter trainer;
  ProtobufWriter normalizer;

  // Has "<unk>" as piece 0, and neither a dummy prefix nor other changes of the text.
  explicit ModelFile(Kind kind) {
    add("<unk>", 0, kUnknown);
    trainer.varint(3, kind);
    normalizer.varint(3, 0).varint(4, 0);
  }
  ModelFile& add(std::string_view text, float score, PieceType type = kNormal) {
    pieces.bytes(1, ProtobufWriter().bytes(1, text).number(2, score).varint(3, type).str());
    return *this;
  }
  ModelFile& add_bytes() {
    constexpr char kDigits[] = "0123456789ABCDEF";
    for (size_t i = 0; i < 256; ++i) {
      add(std::string("<0x") + kDigits[i >> 4] + kDigits[i & 15] + '>', 0, kByte);
    }
    trainer.varint(35, 1);
    return *this;
  }
  std::string str() const {
    return pieces.str() + ProtobufWriter().bytes(2, trainer.str()).bytes(3, normalizer.str()).str();
  }
};

}  // namespace sqz::testing
