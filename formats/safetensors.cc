#include "formats/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "formats/base/checked.h"
#include "formats/base/json.h"
#include "formats/json_fields.h"

namespace sqz {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation

// Decodes the header while it is read: no document is built, so that opening stays cheap.
class HeaderHandler : public JsonVisitor {
 public:
  HeaderHandler(SafetensorsHeader& header, std::string_view path) : header_(header), path_(path) {}

  Status scalar(const JsonValue& value) override {
    const auto number = value.unsigned_integer();
    if (place_ == Place::kShape && number && std::in_range<int64_t>(*number)) {
      tensor_.shape.push_back(static_cast<int64_t>(*number));
      return {};
    }
    if (place_ == Place::kOffsets && number && range_.size() < 2) {
      range_.push_back(*number);
      return {};
    }
    if (place_ == Place::kMetadata && value.is_string()) {
      return header_.metadata.emplace(key_, value.string()).second ? Status() : duplicate();
    }
    if (place_ == Place::kTensor && key_ == "dtype" && value.is_string()) {
      const auto dtype = dtype_from_name(value.string());
      if (!dtype) return unexpected(in_quotes(value.string()));
      tensor_.dtype = *dtype;
      return {};
    }
    return unexpected(found_text(value));
  }

  Status key(std::string_view name) override {
    key_ = name;
    if (place_ != Place::kTensor) return {};
    const auto field =
        static_cast<size_t>(std::find(kFields.begin(), kFields.end(), name) - kFields.begin());
    if (field == kFields.size()) return fail(in_quotes(key_), "dtype, shape and data_offsets only");
    return std::exchange(seen_[field], true) ? duplicate() : Status();
  }

  Status open(bool object) override {
    if (!object) return open_array();
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
      return {};
    }
    if (place_ != Place::kTop) return unexpected("an object");
    if (key_ == "__metadata__") {
      if (seen_metadata_) return duplicate();
      seen_metadata_ = true;
      place_ = Place::kMetadata;
      return {};
    }
    place_ = Place::kTensor;
    tensor_ = {};
    tensor_.name = std::move(key_);
    key_.clear();
    seen_ = {};
    return {};
  }

  Status close(bool object) override {
    if (!object) {
      if (place_ == Place::kOffsets && range_.size() != 2) return unexpected("one number or none");
      place_ = Place::kTensor;
      return {};
    }
    if (place_ == Place::kTensor) SQZ_RETURN_IF_ERROR(finish_tensor());
    place_ = place_ == Place::kTop ? Place::kEnd : Place::kTop;
    return {};
  }

  Status not_valid(const std::string& what) const override {
    const char* header = field().starts_with("header") ? ": " : ": header: ";
    return {Code::kCorrupt, concat(path_, header, field(), ": not valid JSON: ", what)};
  }

 private:
  Status open_array() {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
      range_.clear();
    } else {
      return unexpected("an array");
    }
    return {};
  }

  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };
  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};

  // What the value at hand belongs to, as messages name it.
  std::string field() const {
    if (place_ == Place::kStart || place_ == Place::kEnd) return "header";
    if (place_ == Place::kTop) return concat("header: ", in_quotes(key_));
    if (place_ == Place::kMetadata) return concat("header: __metadata__: ", in_quotes(key_));
    return concat("tensor ", in_quotes(tensor_.name), key_.empty() ? "" : ": ", key_);
  }

  const char* expected() const {
    if (place_ == Place::kMetadata) return "a string";
    if (place_ == Place::kShape) return "integers in [0, 2^63)";
    if (place_ == Place::kOffsets) return "two integers in [0, 2^64)";
    if (place_ != Place::kTensor) return "an object";
    return key_ == "dtype"   ? "a dtype: BOOL, U8, I8, U16, I16, F16, BF16, U32, I32, F32, "
                               "U64, I64 or F64"
           : key_ == "shape" ? "an array of integers"
                             : "an array of two integers";
  }

  Status fail(const std::string& found, const std::string& wanted) const {
    return Refuse{path_}(field(), found, wanted);
  }
  Status unexpected(const std::string& found) const { return fail(found, expected()); }
  Status duplicate() const { return fail("the key twice", "it once"); }

  Status finish_tensor() {
    key_.clear();
    for (size_t i = 0; i < kFields.size(); ++i) {
      if (!seen_[i]) return fail(concat("no ", kFields[i]), "dtype, shape and data_offsets");
    }
    key_ = "data_offsets";
    const auto [begin, end] = std::pair(range_[0], range_[1]);
    if (begin > end) return fail(concat("[", begin, ", ", end, "]"), "begin <= end");
    const auto count = checked_elements(tensor_.shape);
    const auto bytes = count ? checked_mul(*count, dtype_size(tensor_.dtype)) : std::nullopt;
    if (!bytes) {
      key_ = "shape";
      return fail(shape_text(tensor_.shape), "a size below 2^63 bytes");
    }
    if (end - begin != static_cast<uint64_t>(*bytes)) {
      return fail(concat(end - begin, " bytes"),
                  concat(*bytes, " for ", dtype_name(tensor_.dtype), shape_text(tensor_.shape)));
    }
    tensor_.offset = begin;  // made absolute once all are known
    tensor_.bytes = end - begin;
    header_.tensors.push_back(std::move(tensor_));
    return {};
  }

  SafetensorsHeader& header_;
  std::string_view path_;
  Place place_ = Place::kStart;
  std::string key_;
  TensorInfo tensor_;
  std::array<bool, kFields.size()> seen_{};  // of tensor_, so far
  std::vector<uint64_t> range_;
  bool seen_metadata_ = false;
};

// Sorts by offset and makes sure that the tensors tile [0, data_bytes) without hole or overlap.
Status check_tiling(std::vector<TensorInfo>& tensors, uint64_t data_offset, uint64_t data_bytes,
                    std::string_view path) {
  const auto before = [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  };
  if (!std::is_sorted(tensors.begin(), tensors.end(), before)) {
    std::stable_sort(tensors.begin(), tensors.end(), before);
  }
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
  HeaderHandler handler(header, path);
  SQZ_RETURN_IF_ERROR(visit_json(text, handler));
  SQZ_RETURN_IF_ERROR(
      check_tiling(header.tensors, header.data_offset, file_size - header.data_offset, path));

  header.by_name_.resize(header.tensors.size());
  std::iota(header.by_name_.begin(), header.by_name_.end(), 0u);
  const auto name = [&](uint32_t i) -> const std::string& { return header.tensors[i].name; };
  std::sort(header.by_name_.begin(), header.by_name_.end(),
            [&](uint32_t a, uint32_t b) { return name(a) < name(b); });
  const auto twice = std::adjacent_find(header.by_name_.begin(), header.by_name_.end(),
                                        [&](uint32_t a, uint32_t b) { return name(a) == name(b); });
  if (twice != header.by_name_.end()) {
    return Refuse{path}("tensor " + in_quotes(name(*twice)), "the name twice", "it once");
  }
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
