#include "formats/container_writer.h"

#include "formats/base/hash.h"
#include "formats/base/json.h"

namespace sqz {
namespace {

bool has_checksum(const PlannedTensor& tensor) {
  return !tensor.name.starts_with(kPaddingPrefix) && tensor.name != kHeaderHashName;
}

// With the paddings that the alignments ask for.
Result<std::vector<PlannedTensor>> place_tensors(std::vector<PlannedTensor> tensors) {
  std::vector<PlannedTensor> placed;
  placed.reserve(2 * tensors.size());
  uint64_t end = 0;
  int64_t paddings = 0;
  for (PlannedTensor& tensor : tensors) {
    const uint64_t gap = (tensor.alignment - end % tensor.alignment) % tensor.alignment;
    if (gap > 0) {
      placed.push_back({.name = concat(kPaddingPrefix, paddings++),
                        .shape = {static_cast<int64_t>(gap)},
                        .offset = end,
                        .bytes = gap});
    }
    tensor.offset = end + gap;  // no overflow: `end` is at most 2^63
    end = tensor.offset + tensor.bytes;
    if (end > uint64_t{INT64_MAX}) {
      return Status(Code::kInvalidArgument,
                    concat("the file would be larger than 2^63 bytes at ", tensor.name));
    }
    placed.push_back(std::move(tensor));
  }
  return placed;
}

// The header's JSON text: metadata first, then the tensors in order.
std::string header_text(const std::map<std::string, std::string>& metadata,
                        std::span<const PlannedTensor> tensors) {
  std::string out = "{\"__metadata__\":" + JsonText(metadata).str();
  for (const PlannedTensor& tensor : tensors) {
    out += ',' + JsonText(tensor.name).str() +
           ":{\"dtype\":" + JsonText(dtype_name(tensor.dtype)).str() +
           ",\"shape\":" + JsonText(tensor.shape).str() + ",\"data_offsets\":" +
           JsonText(std::vector{tensor.offset, tensor.offset + tensor.bytes}).str() + '}';
  }
  return out + '}';
}

// {name: hash} of all tensors but paddings and the header's hash.
std::string checksum_text(std::span<const PlannedTensor> tensors,
                          std::span<const std::optional<uint64_t>> hashes) {
  std::string out = "{";
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!has_checksum(tensors[i])) continue;
    if (out.size() > 1) out += ',';
    out += JsonText(tensors[i].name).str() + ':' + JsonText(hex(hashes[i].value_or(0))).str();
  }
  return out + '}';
}

}  // namespace

std::map<std::string, std::string> origin_strings(FileKind kind, int64_t version,
                                                  const FileOrigin& origin) {
  return {{"format", "sqz"},
          {"format_version", std::to_string(version)},
          {"kind", kind_name(kind)},
          {"producer", origin.producer},
          {"model", to_json(origin.model).str()},
          {"tokenizer_hash", origin.tokenizer_hash}};
}

Result<ContainerLayout> ContainerLayout::make(std::map<std::string, std::string> metadata,
                                              std::vector<PlannedTensor> tensors, size_t room) {
  ContainerLayout out;
  out.metadata = std::move(metadata);
  SQZ_ASSIGN_OR_RETURN(out.tensors, place_tensors(std::move(tensors)));
  out.metadata[kChecksumsKey] =
      checksum_text(out.tensors, std::vector<std::optional<uint64_t>>(out.tensors.size()));
  const uint64_t text = header_text(out.metadata, out.tensors).size() + room;
  out.data_offset = (8 + text + kPage - 1) / kPage * kPage;
  out.bytes = out.data_offset + out.tensors.back().offset + out.tensors.back().bytes;
  return out;
}

Result<std::string> ContainerLayout::header() const {
  std::string text = header_text(metadata, tensors);
  const auto room = static_cast<size_t>(data_offset - 8);
  if (text.size() > room) {
    return Status(Code::kInvalidArgument,
                  concat("metadata: found ", text.size(), " bytes, expected at most ", room));
  }
  text.resize(room, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(room >> (8 * i) & 0xff);
  return length + text;
}

ContainerWriter::ContainerWriter(std::string path, ContainerLayout layout, AtomicFile file)
    : path_(std::move(path)),
      layout_(std::move(layout)),
      file_(std::move(file)),
      hashes_(layout_.tensors.size()) {
  for (size_t i = 0; i < hashes_.size(); ++i) by_name_[layout_.tensors[i].name] = i;
}

Result<ContainerWriter> ContainerWriter::create(Env& env, const std::string& path, bool replace,
                                                ContainerLayout layout) {
  SQZ_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(env, path, replace));
  SQZ_RETURN_IF_ERROR(env.check_room(path, layout.bytes));  // before hours of work
  return ContainerWriter(path, std::move(layout), std::move(file));
}

const PlannedTensor* ContainerWriter::find(std::string_view name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : &layout_.tensors[at->second];
}

Status ContainerWriter::put(const PlannedTensor& tensor, std::span<const std::byte> data) {
  std::optional<uint64_t>& hash = hashes_[index_of(tensor)];
  if (data.size() != tensor.bytes || hash) {
    return Refuse{path_, Code::kInternal}(tensor.name, concat(data.size(), " bytes"),
                                          concat(tensor.bytes, ", once"));
  }
  hash = xxh3_64(data);
  return file_.file().write(layout_.data_offset + tensor.offset, data);
}

Status ContainerWriter::put(std::string_view name, std::span<const std::byte> data) {
  const PlannedTensor* tensor = find(name);
  if (tensor == nullptr) return {Code::kInternal, concat(path_, ": no tensor ", name)};
  return put(*tensor, data);
}

Result<uint64_t> ContainerWriter::commit(const std::map<std::string, std::string>& more) {
  for (size_t i = 0; i < hashes_.size(); ++i) {
    if (hashes_[i] || !has_checksum(layout_.tensors[i])) continue;
    return Status(Code::kInternal, concat(path_, ": no data for ", layout_.tensors[i].name));
  }
  for (const auto& [key, value] : more) layout_.metadata[key] = value;
  layout_.metadata[kChecksumsKey] = checksum_text(layout_.tensors, hashes_);
  const Result<std::string> header = layout_.header();
  if (!header.ok()) return Status(header.status().code(), path_ + ": " + header.status().message());
  const auto bytes = std::as_bytes(std::span(*header));
  SQZ_RETURN_IF_ERROR(file_.file().write(0, bytes));
  SQZ_RETURN_IF_ERROR(put(kHeaderHashName, xxh3_128(bytes)));
  SQZ_RETURN_IF_ERROR(file_.commit());
  return layout_.bytes;
}

}  // namespace sqz
