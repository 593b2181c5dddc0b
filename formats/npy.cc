#include "formats/npy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>

#include "formats/base/checked.h"

namespace sqz {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr uint64_t kMaxHeader = 64 << 10;  // numpy's own headers are about a hundred bytes

// The text behind 'KEY': in the header, a Python dictionary that numpy writes with plain literals.
std::string_view value_of(std::string_view header, std::string_view key) {
  for (const char quote : {'\'', '"'}) {
    const std::string name = concat(quote, key, quote);
    const size_t at = header.find(name);
    if (at == std::string_view::npos) continue;
    const size_t value = header.find_first_not_of(" :", at + name.size());
    return value == std::string_view::npos ? std::string_view() : header.substr(value);
  }
  return {};
}

// The number in "(3,)"; empty for anything else.
std::optional<int64_t> only_number(std::string_view tuple) {
  int64_t out = 0;
  if (!tuple.starts_with('(')) return std::nullopt;
  const char* end = tuple.data() + tuple.size();
  const auto [rest, error] = std::from_chars(tuple.data() + 1, end, out);
  const std::string_view after(rest, static_cast<size_t>(end - rest));
  if (error != std::errc() || !(after.starts_with(",)") || after.starts_with(", )"))) {
    return std::nullopt;
  }
  return out;
}

template <class T>
Status append_ids(std::span<const std::byte> bytes, const std::string& path, int64_t first,
                  std::vector<int32_t>& ids) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(T)) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    const auto id = checked_cast<int32_t>(value);
    if (!id || *id < 0) {
      return Refuse{path}(concat("item ", first + static_cast<int64_t>(at / sizeof(T))), value,
                          "a token id in [0, 2147483648)");
    }
    ids.push_back(*id);
  }
  return {};
}

struct ItemType {
  const char* descr;
  int64_t size;
  decltype(&append_ids<int32_t>) append;
};
constexpr ItemType kItemTypes[] = {{"<u2", 2, append_ids<uint16_t>},
                                   {"<i4", 4, append_ids<int32_t>},
                                   {"<u4", 4, append_ids<uint32_t>},
                                   {"<i8", 8, append_ids<int64_t>}};

struct Layout {
  uint64_t data_offset = 0;
  const ItemType* type = nullptr;
  int64_t count = 0;
};

// The length of the dictionary and where it starts, from the file's first bytes.
Status read_prefix(const ReadFile& file, uint64_t& start, uint64_t& length) {
  std::array<std::byte, 12> prefix{};
  const uint64_t have = std::min<uint64_t>(prefix.size(), file.size());
  SQZ_RETURN_IF_ERROR(file.read(0, std::span(prefix).first(have)));
  const Refuse refuse{file.path()};
  if (have < 10 || std::memcmp(prefix.data(), kMagic.data(), kMagic.size()) != 0) {
    return refuse("first bytes", "something else",
                  "\"\\x93NUMPY\": the file is not in NumPy's .npy format");
  }
  const auto byte = [&](size_t i) { return std::to_integer<uint64_t>(prefix[i]); };
  const uint64_t major = byte(6);
  if (major < 1 || major > 3) {
    return Refuse{file.path(), Code::kUnsupported}("format version", major, "1 to 3");
  }
  start = major == 1 ? 10 : 12;
  length = byte(8) | byte(9) << 8;
  if (major > 1) length |= byte(10) << 16 | byte(11) << 24;
  const uint64_t most = std::min(kMaxHeader, file.size() < start ? 0 : file.size() - start);
  if (length <= most) return {};
  return refuse("header length", concat(length, " bytes"), concat("at most ", most));
}

Result<Layout> read_layout(const ReadFile& file) {
  uint64_t start = 0, length = 0;
  SQZ_RETURN_IF_ERROR(read_prefix(file, start, length));
  std::string text(length, '\0');
  SQZ_RETURN_IF_ERROR(file.read(start, std::as_writable_bytes(std::span(text))));
  const Refuse corrupt{file.path()}, unsupported{file.path(), Code::kUnsupported};
  for (const char* key : {"descr", "fortran_order", "shape"}) {
    if (value_of(text, key).empty()) return corrupt("header", concat("no '", key, "'"), "one");
  }
  const std::string_view descr = value_of(text, "descr"), shape = value_of(text, "shape");
  const ItemType* type =
      std::find_if(std::begin(kItemTypes), std::end(kItemTypes),
                   [&](const ItemType& t) { return descr.substr(1).starts_with(t.descr); });
  if (type == std::end(kItemTypes)) {
    return unsupported("descr", in_quotes(descr.substr(0, 8)),
                       "'<i4', '<i8', '<u4' or '<u2' (little-endian integers)");
  }
  if (!value_of(text, "fortran_order").starts_with("False")) {
    return unsupported("fortran_order", "another value", "False");
  }
  const auto number = only_number(shape);
  if (!number) {
    return unsupported("shape", in_quotes(shape.substr(0, 20)), "one number: a list of token ids");
  }
  const int64_t count = *number;
  const uint64_t rest = file.size() - start - length;
  const auto bytes = count < 0 ? std::nullopt : checked_mul(count, type->size);
  if (!bytes || static_cast<uint64_t>(*bytes) != rest) {
    return corrupt("shape", concat(count, " items of ", type->size, " bytes"),
                   concat("what fills the ", rest, " bytes after the header"));
  }
  return Layout{start + length, type, count};
}

}  // namespace

Result<std::vector<int32_t>> read_npy_tokens(Env& env, const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const auto file, env.open_read(path));
  SQZ_ASSIGN_OR_RETURN(const Layout layout, read_layout(*file));
  const int64_t item = layout.type->size;
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(layout.count));
  std::vector<std::byte> block(size_t{1} << 16);  // a multiple of every item size
  const int64_t per_block = static_cast<int64_t>(block.size()) / item;
  for (int64_t first = 0; first < layout.count; first += per_block) {
    const int64_t items = std::min(per_block, layout.count - first);
    const auto bytes = std::span(block).first(static_cast<size_t>(items * item));
    SQZ_RETURN_IF_ERROR(
        file->read(layout.data_offset + static_cast<uint64_t>(first * item), bytes));
    SQZ_RETURN_IF_ERROR(layout.type->append(bytes, path, first, ids));
  }
  return ids;
}

}  // namespace sqz
