#include "formats/sqz_container.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "formats/base/checked.h"
#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "formats/sqz_file.h"

namespace sqz {
namespace {

struct Kind {
  const char* name;
  const char* words;
};
constexpr Kind kFileKinds[] = {{"index", "an index"}, {"qmodel", "a query classifier"}};
const Kind& kind_of(FileKind kind) {
  return kFileKinds[static_cast<size_t>(kind)];
}

Result<std::shared_ptr<std::byte>> read_all(const ReadFile& file) {
  const auto size = static_cast<size_t>(file.size());
  void* memory = nullptr;
  if (::posix_memalign(&memory, kPage, std::max<size_t>(size, 1)) != 0) {
    return Status(Code::kOutOfMemory,
                  concat(file.path(), ": no memory for its ", size, " bytes; open it mapped"));
  }
  std::shared_ptr<std::byte> buffer(static_cast<std::byte*>(memory), std::free);
  SQZ_RETURN_IF_ERROR(file.read(0, {buffer.get(), size}));
  return buffer;
}

// The user has most likely named some other file. This says so in words, before the parser
// complains about the length of a header that is not one.
Status refuse_foreign(std::span<const std::byte> bytes, FileKind kind, const std::string& path) {
  const std::string start = concat(path, ": not ", kind_of(kind).words, ": ");
  if (bytes.empty()) return {Code::kCorrupt, start + "the file is empty"};
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with("GGUF"))
    return {Code::kCorrupt, start + "found a GGUF file, which is not read"};
  // As a length, eight characters of text would be more than 2^56.
  const std::string_view first = text.substr(0, 8);
  const bool length_is_text = std::all_of(first.begin(), first.end(), [](char c) {
    return (c >= ' ' && c <= '~') || (c >= '\t' && c <= '\r');
  });
  if (!length_is_text) return {};
  return {Code::kCorrupt, concat(start, "it begins with ", in_quotes(text.substr(0, 16)),
                                 ", expected a safetensors header")};
}

// Checks that a file which is to be read whole looks like one of ours, before memory is taken for
// it.
Status check_start(const ReadFile& file, FileKind kind) {
  std::array<std::byte, 16> start{};
  const auto begin = std::span(start).first(std::min<size_t>(start.size(), file.size()));
  SQZ_RETURN_IF_ERROR(file.read(0, begin));
  SQZ_RETURN_IF_ERROR(refuse_foreign(begin, kind, file.path()));
  return read_safetensors_header(file).status();
}

Status check_header_hash(const SafetensorsHeader& header, std::span<const std::byte> bytes,
                         const std::string& path) {
  const TensorInfo* last = header.tensors.empty() ? nullptr : &header.tensors.back();
  if (last == nullptr || last->name != kHeaderHashName || last->bytes != 16) {
    return Refuse{path}("last tensor", last == nullptr ? "none" : in_quotes(last->name),
                        concat(in_quotes(kHeaderHashName), " with 16 bytes"));
  }
  const auto stored = bytes.subspan(static_cast<size_t>(last->offset), 16);
  const auto actual = xxh3_128(bytes.first(static_cast<size_t>(header.data_offset)));
  if (std::memcmp(stored.data(), actual.data(), 16) != 0) {
    return Refuse{path}("hash of the header", hex(actual),
                        concat(hex(stored), ", as stored: the header was changed or damaged"));
  }
  return {};
}

// Before the hash, so that a newer or a foreign file is called that, and not damaged.
Status check_format(JsonFields in, FileKind want, const std::string& path) {
  const JsonValue* format = in.find("format");
  if (format == nullptr || format->string() != "sqz") {
    return Refuse{path}(
        concat("a safetensors file but not ", kind_of(want).words, ": __metadata__: format"),
        format == nullptr ? "nothing" : found_text(*format), "\"sqz\"");
  }
  const int64_t version = in.integer("format_version", 1, INT64_MAX);
  const int64_t newest = want == FileKind::kIndex ? kVersionOfLayers : 1;
  const std::string producer = in.text("producer");
  if (in.text("kind") != kind_name(want)) {
    in.complain("kind", in_quotes(kind_name(want)), Code::kUnsupported);
  }
  SQZ_RETURN_IF_ERROR(in.status());
  if (version > newest) {
    return {Code::kUnsupported,
            concat(path, ": format_version: found ", version, " (written by ", in_quotes(producer),
                   "), expected at most ", newest, ", which ", producer_name(),
                   " reads: use a newer sqz, or make the file again with this one")};
  }
  return {};
}

// Neither NaN nor infinity: no number has an exponent of all ones, which `mask` cuts out.
template <class T>
bool all_finite(std::span<const std::byte> bytes, T mask) {
  const auto* x = reinterpret_cast<const T*>(bytes.data());
  T special = 0;
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    special |= static_cast<T>((x[i] & mask) == mask);
  }
  return special == 0;
}

bool finite_floats(const TensorInfo& tensor, std::span<const std::byte> bytes) {
  if (tensor.name.find(".state.") != std::string::npos) return true;  // bytes as an engine had them
  switch (tensor.dtype) {
    case DType::kBF16:
      return all_finite<uint16_t>(bytes, 0x7f80);
    case DType::kF16:
      return all_finite<uint16_t>(bytes, 0x7c00);
    case DType::kF32:  // thresholds may be -infinity: check_calibration() sees to them
      return tensor.name.starts_with("calibration.") || all_finite<uint32_t>(bytes, 0x7f800000);
    default:
      return true;
  }
}

}  // namespace

const char* kind_name(FileKind kind) {
  return kind_of(kind).name;
}

std::string producer_name() {
  return "sqz " SQZ_VERSION;
}

Result<JsonDocument> metadata_json(const std::map<std::string, std::string>& strings,
                                   const std::string& label) {
  constexpr std::string_view kWords[] = {"format",         "kind",        "producer",
                                         "tokenizer_hash", "tokens_hash", "partition",
                                         "dtype",          "rows",        kLogitsKey};
  std::vector<char> out;  // whose code, unlike that of strings, MemorySanitizer sees
  const auto add = [&](std::string_view piece) {
    out.insert(out.end(), piece.begin(), piece.end());
  };
  for (const auto& [key, text] : strings) {
    if (key == kChecksumsKey) continue;
    const bool word = std::find(std::begin(kWords), std::end(kWords), key) != std::end(kWords);
    const bool json = !word && parse_json(text, key).ok();
    add(out.empty() ? "{" : ",");
    add(JsonText(key).str());
    add(":");
    add(json ? text : JsonText(text).str());
  }
  add(out.empty() ? "{}" : "}");
  return parse_json({out.data(), out.size()}, label);
}

bool is_hash(const std::string& text) {
  return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

void read_origin(JsonFields& in, FileOrigin& origin) {
  origin.producer = in.text("producer");
  origin.tokenizer_hash = in.text("tokenizer_hash");
  if (!origin.tokenizer_hash.empty() && !is_hash(origin.tokenizer_hash)) {
    in.complain("tokenizer_hash", "16 hexadecimal digits or none");
  }
  in.parse("model", origin.model, model_from_json);
}

void check_logits(JsonFields& in, const char* remedy) {
  if (in.text(kLogitsKey, "") == kLogitsOfKeys) return;
  in.complain(kLogitsKey, concat(in_quotes(kLogitsOfKeys), ": ", remedy));
}

std::span<const std::byte> SqzContainer::tensor(std::string_view name) const {
  const TensorInfo* info = header.find(name);
  return info ? bytes.subspan(info->offset, info->bytes) : std::span<const std::byte>();
}

Result<SqzContainer> open_container(const std::string& path, FileKind kind, OpenMode mode,
                                    Env& env) {
  SqzContainer c;
  c.path = path;
  SQZ_ASSIGN_OR_RETURN(auto file, env.open_read(path));
  if (mode == OpenMode::kMmap) {
    SQZ_ASSIGN_OR_RETURN(c.mapping, file->map());
    c.bytes = c.mapping->bytes();
    c.file = std::move(file);
  } else {
    SQZ_RETURN_IF_ERROR(check_start(*file, kind));
    SQZ_ASSIGN_OR_RETURN(c.buffer, read_all(*file));
    c.bytes = {c.buffer.get(), static_cast<size_t>(file->size())};
  }
  SQZ_RETURN_IF_ERROR(refuse_foreign(c.bytes, kind, path));
  SQZ_ASSIGN_OR_RETURN(c.header, parse_safetensors_header(c.bytes, c.bytes.size(), path));
  SQZ_ASSIGN_OR_RETURN(c.metadata, metadata_json(c.header.metadata, path + ": __metadata__"));
  SQZ_RETURN_IF_ERROR(check_format(c.fields(), kind, path));
  SQZ_RETURN_IF_ERROR(check_header_hash(c.header, c.bytes, path));
  if (!c.header.metadata.contains(kChecksumsKey)) {
    return Refuse{path}(concat("__metadata__: ", kChecksumsKey), "nothing", "a value");
  }
  return c;
}

bool is_unused(std::string_view name) {
  return name.starts_with("calibration.keys.") || name == "rotation" ||
         name.find(".key_codes") != std::string_view::npos;
}

Status match_tensors(const SafetensorsHeader& header,
                     const Result<std::vector<PlannedTensor>>& plan, const std::string& path) {
  if (!plan.ok()) return Status(Code::kCorrupt, plan.status().message());
  const Refuse refuse{path};
  const auto type_of = [](const auto& tensor) {
    return concat(dtype_name(tensor.dtype), shape_text(tensor.shape));
  };
  if (header.data_offset % kPage != 0) {
    return refuse("start of the data", concat("byte ", header.data_offset),
                  concat("a multiple of ", kPage));
  }
  size_t next = 0;
  for (const TensorInfo& found : header.tensors) {
    const std::string field = "tensor " + in_quotes(found.name);
    if (found.name.starts_with(kPaddingPrefix)) {
      if (found.dtype == DType::kU8 && found.shape.size() == 1) continue;
      return refuse(field, type_of(found), "a padding: U8, one dimension");
    }
    if (is_unused(found.name)) continue;
    if (next == plan->size()) return refuse("tensors", in_quotes(found.name), "their end");
    const PlannedTensor& want = (*plan)[next++];
    if (found.name != want.name) {
      return refuse("tensors", in_quotes(found.name), in_quotes(want.name) + " at this place");
    }
    if (found.dtype != want.dtype || found.shape != want.shape) {
      return refuse(field, type_of(found), type_of(want));
    }
    if (found.offset % want.alignment != 0) {
      return refuse(field + ": offset", concat("byte ", found.offset),
                    concat("a multiple of ", want.alignment));
    }
  }
  if (next == plan->size()) return {};
  return refuse("tensors", "their end", in_quotes((*plan)[next].name));
}

Status TensorCheck::init() {
  const std::string label = container_.path + ": __metadata__: checksums";
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json,
                       parse_json_object(container_.header.metadata.at(kChecksumsKey), label));
  for (const JsonValue& member : json.root().items()) {
    if (!member.is_string() || container_.header.find(member.key()) == nullptr) {
      return Refuse{label}(in_quotes(member.key()), found_text(member),
                           "the name of a tensor, and a string");
    }
    checksums_.emplace(member.key(), member.string());
  }
  return {};
}

Status TensorCheck::run(const TensorInfo& tensor,
                        const std::function<void(size_t)>& advance) const {
  if (tensor.name == kHeaderHashName) return {};
  const bool padding = tensor.name.starts_with(kPaddingPrefix);
  const auto data = container_.bytes.subspan(tensor.offset, tensor.bytes);
  Xxh3Stream hash;
  bool finite = true, zero = true;
  for (size_t from = 0; from < data.size(); from += kChecksumChunk) {
    const auto chunk = data.subspan(from, std::min(kChecksumChunk, data.size() - from));
    if (padding) {
      zero &= std::all_of(chunk.begin(), chunk.end(), [](std::byte b) { return b == std::byte{}; });
    } else {
      hash.update(chunk);
      finite &= finite_floats(tensor, chunk);
    }
    if (advance) advance(chunk.size());
  }
  const Refuse refuse{container_.path};
  const std::string field = "tensor " + in_quotes(tensor.name);
  if (padding) return zero ? Status() : refuse(field, "other bytes", "zeros");
  if (!finite) return refuse(field, "NaN or infinity", "finite numbers");
  const auto stored = checksums_.find(tensor.name);
  const std::string found = hex(hash.digest());
  if (stored == checksums_.end())
    return refuse(field + ": XXH3-64", "none in the checksums", found);
  return stored->second == found ? Status()
                                 : refuse(field + ": XXH3-64", found, in_quotes(stored->second));
}

bool has_kind(const std::string& path, FileKind kind, Env& env) {
  const auto file = env.open_read(path);
  if (!file.ok()) return false;
  const auto header = read_safetensors_header(**file);
  if (!header.ok()) return false;
  const auto found = header->metadata.find("kind");
  return found != header->metadata.end() && found->second == kind_name(kind);
}

PlannedTensor header_hash_tensor() {
  return {kHeaderHashName, DType::kU8, {16}};
}

Status size_tensors(std::vector<PlannedTensor>& tensors, const std::string& label) {
  for (PlannedTensor& tensor : tensors) {
    const auto count = checked_elements(tensor.shape);
    const auto bytes = count ? checked_mul(*count, dtype_size(tensor.dtype)) : std::nullopt;
    if (!bytes) {
      return Refuse{label, Code::kInvalidArgument}(tensor.name, shape_text(tensor.shape),
                                                   "a size below 2^63 bytes");
    }
    tensor.bytes = static_cast<uint64_t>(*bytes);
  }
  return {};
}

}  // namespace sqz
