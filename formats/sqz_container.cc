#include "formats/sqz_container.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "formats/base/checked.h"
#include "formats/base/hash.h"
#include "formats/base/json.h"
#include "formats/metadata_strings.h"
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

// What a user most likely did: named some other file. Says so in words, before the parser complains
// about the length of a header that is not one.
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

// Of a file that is to be read whole: that it looks like one of ours, before memory is taken for
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
Status check_format(const std::map<std::string, std::string>& strings, FileKind want,
                    const std::string& path) {
  MetadataStrings in(strings, path);
  const auto format = strings.find("format");
  if (format == strings.end() || format->second != "sqz") {
    return Refuse{path}(
        concat("a safetensors file but not ", kind_of(want).words, ": __metadata__: format"),
        format == strings.end() ? "nothing" : in_quotes(format->second), "\"sqz\"");
  }
  const int64_t version = in.integer("format_version", 1, INT64_MAX);
  const std::string producer = in.string("producer"), kind = in.string("kind");
  SQZ_RETURN_IF_ERROR(in.status());
  const int64_t newest = want == FileKind::kIndex ? kFormatVersion : 1;
  if (kind != kind_name(want)) {
    return Refuse{path, Code::kUnsupported}("__metadata__: kind", in_quotes(kind),
                                            in_quotes(kind_name(want)));
  }
  if (version > newest) {
    return {Code::kUnsupported,
            concat(path, ": format_version: found ", version, " (written by ", in_quotes(producer),
                   "), expected at most ", newest, ", which ", producer_name(),
                   " reads: use a newer sqz, or make the file again with this one")};
  }
  return {};
}

}  // namespace

const char* kind_name(FileKind kind) {
  return kind_of(kind).name;
}

std::string producer_name() {
  return "sqz " SQZ_VERSION;
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
  SQZ_RETURN_IF_ERROR(check_format(c.header.metadata, kind, path));
  SQZ_RETURN_IF_ERROR(check_header_hash(c.header, c.bytes, path));
  if (!c.header.metadata.contains(kChecksumsKey)) {
    return Refuse{path}(concat("__metadata__: ", kChecksumsKey), "nothing", "a value");
  }
  return c;
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
