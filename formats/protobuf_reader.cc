#include "formats/protobuf_reader.h"

namespace sqz {

Status ProtobufReader::bad(std::string_view found) const {
  return {Code::kCorrupt, bad_field(file_, "content", found, expected_)};
}

Status ProtobufReader::read_varint(uint64_t& value) {
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

Status ProtobufReader::read_fixed(size_t size, uint64_t& value) {
  if (message_.size() - offset_ < size) return bad("an end within a number");
  value = 0;
  for (size_t i = 0; i < size; ++i) {
    value |= uint64_t{static_cast<unsigned char>(message_[offset_ + i])} << (8 * i);
  }
  offset_ += size;
  return {};
}

Status ProtobufReader::read_bytes(std::string_view& bytes) {
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

Result<bool> ProtobufReader::next(ProtobufField& field) {
  if (offset_ == message_.size()) return false;
  uint64_t tag = 0;
  SQZ_RETURN_IF_ERROR(read_varint(tag));
  constexpr uint64_t kLargestNumber = (uint64_t{1} << 29) - 1;
  if (tag >> 3 == 0 || tag >> 3 > kLargestNumber) return bad(concat("field number ", tag >> 3));
  field = {static_cast<uint32_t>(tag >> 3), static_cast<ProtobufField::Type>(tag & 7), 0, {}};
  using Type = ProtobufField::Type;
  const Status status = field.type == Type::kVarint    ? read_varint(field.value)
                        : field.type == Type::kFixed64 ? read_fixed(8, field.value)
                        : field.type == Type::kFixed32 ? read_fixed(4, field.value)
                        : field.type == Type::kBytes
                            ? read_bytes(field.bytes)
                            : bad(concat("wire type ", tag & 7, " of field ", field.number));
  SQZ_RETURN_IF_ERROR(status);
  return true;
}

}  // namespace sqz
