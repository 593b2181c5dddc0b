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

// What a header's Python dictionary may say of an array of ids.
struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// The subset of Python literals that numpy writes: {'key': 'text' | True | False | (1, 2)}.
class LiteralParser {
 public:
  explicit LiteralParser(std::string_view text) : text_(text) {}

  // Empty if all went well, else what is wrong.
  std::string parse(Header& header) {
    if (!take('{')) return "no '{' at the start";
    while (!take('}')) {
      const auto key = string();
      if (!key || !take(':')) return concat("no 'key': at byte ", at_);
      if (std::string problem = value(*key, header); !problem.empty()) return problem;
      if (!take(',') && peek() != '}') return concat("no ',' or '}' at byte ", at_);
    }
    skip_space();
    return at_ == text_.size() ? "" : concat("text after '}' at byte ", at_);
  }

 private:
  std::string value(const std::string& key, Header& header) {
    if (key == "descr") return set(key, header.descr, string());
    if (key == "fortran_order") return set(key, header.fortran_order, boolean());
    if (key == "shape") return set(key, header.shape, tuple());
    return concat("unknown key '", key, "'");
  }

  template <class T>
  std::string set(const std::string& key, std::optional<T>& field, std::optional<T> value) {
    if (field) return concat("key '", key, "' twice");
    if (!value) return concat("a value of '", key, "' that is not understood");
    field = std::move(value);
    return "";
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  std::optional<std::string> string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') return std::nullopt;
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) return std::nullopt;
    std::string out(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return out;
  }

  std::optional<bool> boolean() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    return std::nullopt;
  }

  std::optional<std::vector<int64_t>> tuple() {
    if (!take('(')) return std::nullopt;
    std::vector<int64_t> out;
    while (!take(')')) {
      skip_space();
      int64_t value = 0;
      const char* begin = text_.data() + at_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
      if (error != std::errc()) return std::nullopt;
      at_ += static_cast<size_t>(end - begin);
      out.push_back(value);
      if (!take(',') && peek() != ')') return std::nullopt;
    }
    return out;
  }

  std::string_view text_;
  size_t at_ = 0;
};

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
  Header header;
  if (std::string problem = LiteralParser(text).parse(header); !problem.empty()) {
    return corrupt("header", problem, "a dictionary of descr, fortran_order and shape");
  }
  if (!header.descr || !header.fortran_order || !header.shape) {
    const char* missing = !header.descr ? "descr" : !header.shape ? "shape" : "fortran_order";
    return corrupt("header", concat("no '", missing, "'"), "descr, fortran_order and shape");
  }
  const ItemType* type = std::find_if(std::begin(kItemTypes), std::end(kItemTypes),
                                      [&](const ItemType& t) { return t.descr == header.descr; });
  if (type == std::end(kItemTypes)) {
    return unsupported("descr", concat("'", *header.descr, "'"),
                       "'<i4', '<i8', '<u4' or '<u2' (little-endian integers)");
  }
  if (*header.fortran_order) return unsupported("fortran_order", "True", "False");
  if (header.shape->size() != 1) {
    return unsupported("shape", concat(header.shape->size(), " dimensions"),
                       "one: a list of token ids");
  }
  const int64_t count = header.shape->front();
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
