// The safetensors container: 8 bytes little-endian header length, a JSON header, then the tensors'
// bytes. This file decodes the header and checks everything that the format promises, so the
// offsets in a SafetensorsHeader may be used without another check.
//
// Refused, each with file, field, found and expected: a header longer than 100,000,000 bytes or
// than the file; JSON that is not an object, duplicate keys, unknown dtype, negative or overflowing
// shape, a byte range that differs from shape x dtype, ranges that overlap, leave a hole or pass
// the end of the file, non-string metadata.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/base/file.h"
#include "formats/base/status.h"

namespace sqz {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // of the first byte, from the start of the file
  uint64_t bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::vector<TensorInfo> tensors;              // by offset
  uint64_t data_offset = 0;                     // 8 + header length

  const TensorInfo* find(std::string_view name) const;  // null if absent; O(log n)

 private:
  friend Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte>, uint64_t,
                                                            std::string_view);
  std::vector<uint32_t> by_name_;
};

// `header`: the file's first bytes, 8 + header length of them at least. `file_size`: of the whole
// file.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> header,
                                                   uint64_t file_size, std::string_view path);

// Reads and parses the header of an open file. Allocates in proportion to the header's length
// (about 80 bytes a JSON value), and nothing before the file is known to be as long.
Result<SafetensorsHeader> read_safetensors_header(const ReadFile& file);

// "[8, 1024, 128]"
std::string shape_text(std::span<const int64_t> shape);

}  // namespace sqz
