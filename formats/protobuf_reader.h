// The wire format of protobuf: one message's fields, one after the other, nothing trusted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "formats/base/status.h"

namespace sqz {

struct ProtobufField {
  // The values are those of the wire. Groups (3 and 4) are refused: nothing writes them any more.
  enum class Type : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  uint32_t number = 0;
  Type type = Type::kVarint;
  uint64_t value = 0;      // of a varint or a fixed number, as it stands
  std::string_view bytes;  // of kBytes: inside the file
};

class ProtobufReader {
 public:
  // `file` names the input in messages, `expected` says what it should be ("a SentencePiece
  // model"); both and `message` outlive the reader. `message` may be the bytes of another's field.
  ProtobufReader(std::string_view message, std::string_view file, std::string_view expected)
      : message_(message), file_(file), expected_(expected) {}

  // Reads the next field; false at the message's end. kCorrupt for what breaks the format: a number
  // of more than 64 bits, a length beyond the end, field number 0, an unknown wire type.
  Result<bool> next(ProtobufField& field);

 private:
  Status bad(std::string_view found) const;
  Status read_varint(uint64_t& value);
  Status read_fixed(size_t size, uint64_t& value);
  Status read_bytes(std::string_view& bytes);

  std::string_view message_;
  std::string_view file_;
  std::string_view expected_;
  size_t offset_ = 0;
};

}  // namespace sqz
