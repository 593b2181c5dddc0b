#include "formats/safetensors.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

#include "formats/base/checked.h"
#include "formats/json_fields.h"

namespace sqz {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation

// `offset` is relative to the data: it is made absolute once all tensors are known.
Result<TensorInfo> read_tensor(const JsonValue& json, std::string_view path) {
  constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};
  const auto refuse = [&](std::string_view key, const std::string& found,
                          const std::string& expected) {
    return Refuse{path}(concat("tensor ", in_quotes(json.key()), ": ", key), found, expected);
  };
  const auto unexpected_field = [&](std::string_view key, const std::string& expected) {
    const JsonValue* field = json.find(key);
    return refuse(key, field == nullptr ? "nothing" : found_text(*field), expected);
  };
  for (const JsonValue& member : json.items()) {
    const auto known = std::find(std::begin(kFields), std::end(kFields), member.key());
    if (known == std::end(kFields)) {
      return refuse(in_quotes(member.key()), found_text(member), "dtype, shape and data_offsets");
    }
  }
  TensorInfo tensor;
  tensor.name = json.key();
  const JsonValue *type = json.find("dtype"), *shape = json.find("shape"),
                  *offsets = json.find("data_offsets");
  const auto dtype = dtype_from_name(type == nullptr ? "" : type->string());
  if (!dtype) {
    return unexpected_field("dtype",
                            "BOOL, U8, I8, U16, I16, F16, BF16, U32, I32, F32, U64, I64 "
                            "or F64");
  }
  tensor.dtype = *dtype;
  if (shape == nullptr || !shape->is_array()) return unexpected_field("shape", "an array");
  for (const JsonValue& size : shape->items()) {
    const auto number = size.integer(0, INT64_MAX);
    if (!number) return refuse("shape", found_text(size), "integers in [0, 2^63)");
    tensor.shape.push_back(*number);
  }
  const bool two = offsets != nullptr && offsets->is_array() && offsets->size() == 2;
  const auto begin = two ? (*offsets)[0].integer(0, INT64_MAX) : std::nullopt;
  const auto end = two ? (*offsets)[1].integer(0, INT64_MAX) : std::nullopt;
  if (!begin || !end || *begin > *end) {
    return unexpected_field("data_offsets",
                            "two integers in [0, 2^63), of which the first is not "
                            "above the second");
  }
  const auto count = checked_elements(tensor.shape);
  const auto bytes = count ? checked_mul(*count, dtype_size(tensor.dtype)) : std::nullopt;
  if (!bytes) return refuse("shape", shape_text(tensor.shape), "a size below 2^63 bytes");
  if (*end - *begin != *bytes) {
    return refuse("data_offsets", concat(*end - *begin, " bytes"),
                  concat(*bytes, " for ", dtype_name(tensor.dtype), shape_text(tensor.shape)));
  }
  tensor.offset = static_cast<uint64_t>(*begin);
  tensor.bytes = static_cast<uint64_t>(*bytes);
  return tensor;
}

// Makes sure that the tensors, which are in the order of their offsets, tile [0, data_bytes)
// without hole or overlap, and makes the offsets absolute.
Status check_tiling(std::vector<TensorInfo>& tensors, uint64_t data_offset, uint64_t data_bytes,
                    std::string_view path) {
  uint64_t end = 0;
  for (TensorInfo& tensor : tensors) {
    if (tensor.offset != end) {
      const char* what = tensor.offset < end ? " (an overlap)" : " (a hole)";
      return Refuse{path}(concat("tensor ", in_quotes(tensor.name), ": data_offsets"),
                          concat("begin ", tensor.offset, what), end);
    }
    end += tensor.bytes;  // no overflow: offset + bytes was read from the file as one number
    tensor.offset += data_offset;
  }
  if (end == data_bytes) return {};
  return Refuse{path}("file length", concat(data_offset + data_bytes, " bytes"),
                      concat(data_offset, " for the header and ", end, " for the tensors"));
}

// The header's length as its first 8 bytes say, once it is plausible.
Result<uint64_t> header_length(std::span<const std::byte> first8, uint64_t file_size,
                               std::string_view path) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= std::to_integer<uint64_t>(first8[i]) << (8 * i);
  if (std::memcmp(first8.data(), "version ", 8) == 0) {
    return Refuse{path}("file", "a Git LFS pointer", "the file itself: git lfs pull");
  }
  if (length > kMaxHeader) {
    return Refuse{path}("header length", length,
                        concat("at most ", kMaxHeader, ": this is no .sqz or .safetensors file"));
  }
  if (length > file_size - 8) {
    return Refuse{path}("header length", length,
                        concat("at most ", file_size - 8, ", what is left of the file"));
  }
  return length;
}

Status too_short(uint64_t size, std::string_view path) {
  return Refuse{path}("file length", concat(size, " bytes"),
                      "8 at least: the length of a safetensors header");
}

}  // namespace

const TensorInfo* SafetensorsHeader::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](uint32_t i, std::string_view n) { return tensors[i].name < n; });
  return at != by_name_.end() && tensors[*at].name == name ? &tensors[*at] : nullptr;
}

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> bytes,
                                                   uint64_t file_size, std::string_view path) {
  if (bytes.size() < 8 || file_size < 8) return too_short(file_size, path);
  SQZ_ASSIGN_OR_RETURN(const uint64_t length, header_length(bytes.first(8), file_size, path));
  if (length > bytes.size() - 8) {
    return Status(Code::kInternal, concat(path, ": the header was not read whole"));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8,
                              static_cast<size_t>(length));
  if (text.empty() || text[0] != '{') {
    return Refuse{path}("header", text.empty() ? "nothing" : in_quotes(text.substr(0, 8)),
                        "a JSON object, from its \"{\" on");
  }

  SafetensorsHeader header;
  header.data_offset = 8 + length;
  const std::string label = concat(path, ": header");
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json_object(text, label));
  std::vector<TensorInfo> by_name;  // the members of an object are in the order of their keys
  for (const JsonValue& member : json.root().items()) {
    if (member.key() != "__metadata__") {
      SQZ_ASSIGN_OR_RETURN(TensorInfo tensor, read_tensor(member, path));
      by_name.push_back(std::move(tensor));
      continue;
    }
    JsonFields metadata(member, concat(label, ": __metadata__"));
    for (const JsonValue& entry : member.items()) {
      if (!entry.is_string()) {
        metadata.complain_of(in_quotes(entry.key()), found_text(entry), "a string");
      }
      header.metadata.emplace(entry.key(), entry.string());
    }
    SQZ_RETURN_IF_ERROR(metadata.status());
  }
  std::vector<uint32_t> by_offset(by_name.size());
  std::iota(by_offset.begin(), by_offset.end(), 0u);
  std::sort(by_offset.begin(), by_offset.end(), [&](uint32_t a, uint32_t b) {
    return std::tuple(by_name[a].offset, by_name[a].bytes, a) <
           std::tuple(by_name[b].offset, by_name[b].bytes, b);
  });
  header.by_name_.resize(by_name.size());
  for (const uint32_t place : by_offset) {
    header.by_name_[place] = static_cast<uint32_t>(header.tensors.size());
    header.tensors.push_back(std::move(by_name[place]));
  }
  SQZ_RETURN_IF_ERROR(
      check_tiling(header.tensors, header.data_offset, file_size - header.data_offset, path));
  return header;
}

Result<SafetensorsHeader> read_safetensors_header(const ReadFile& file) {
  if (file.size() < 8) return too_short(file.size(), file.path());
  std::vector<std::byte> bytes(8);
  SQZ_RETURN_IF_ERROR(file.read(0, bytes));
  SQZ_ASSIGN_OR_RETURN(const uint64_t length, header_length(bytes, file.size(), file.path()));
  bytes.resize(static_cast<size_t>(8 + length));
  SQZ_RETURN_IF_ERROR(file.read(8, std::span(bytes).subspan(8)));
  return parse_safetensors_header(bytes, file.size(), file.path());
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (const int64_t dim : shape) out += concat(out.size() > 1 ? ", " : "", dim);
  return out + "]";
}

}  // namespace sqz
