#include "formats/sqz_writer.h"

#include <algorithm>

#include "formats/base/hash.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

namespace sqz {

struct FileLayout {
  std::vector<PlannedTensor> tensors;
  std::map<std::string, std::string> metadata;  // with checksums of zeros, without calibration
  uint64_t data_offset = 0;
  uint64_t bytes = 0;  // of the file
};

namespace {

// Room in the header for the one text that is not known at create(): the calibration's parameters.
constexpr size_t kCalibrationRoom = 2048;

Result<FileLayout> lay_out(const IndexMetadata& metadata, const std::vector<LayerShape>& shapes,
                           const std::string& path) {
  SQZ_RETURN_IF_ERROR(check_metadata(metadata, path, Code::kInvalidArgument));
  FileLayout layout;
  SQZ_ASSIGN_OR_RETURN(layout.tensors, plan_tensors(metadata, shapes, path));
  SQZ_ASSIGN_OR_RETURN(layout.tensors, place_tensors(std::move(layout.tensors)));
  layout.metadata = metadata_to_strings(metadata);
  layout.metadata[kChecksumsKey] = checksum_text(layout.tensors, {});
  layout.data_offset =
      data_start(header_text(layout.metadata, layout.tensors).size() + kCalibrationRoom);
  layout.bytes = layout.data_offset + layout.tensors.back().offset + layout.tensors.back().bytes;
  return layout;
}

// What a layer's tensors hold, by what follows "layers.N." in their names.
std::map<std::string, std::span<const std::byte>> contents_of(const LayerData& data,
                                                              const IndexMetadata& metadata) {
  const auto bytes = [](const auto& items) { return std::as_bytes(std::span(items)); };
  std::map<std::string, std::span<const std::byte>> out = {
      {"positions", bytes(data.positions)},
      {"heavy", bytes(data.heavy)},
      {"pages.min", data.page_min},
      {"pages.max", data.page_max},
      {"buckets.offsets", bytes(data.bucket_offsets)},
      {"keys", data.keys},
      {"keys.scales", data.key_scales},
      {"values", data.values},
      {"values.scales", data.value_scales},
      {"key_codes", data.key_codes},
      {"key_codes.scales", data.key_code_scales},
      {"exact.keys", data.exact_keys},
      {"exact.values", data.exact_values}};
  for (size_t k = 0; k < data.levels.size(); ++k) {
    const std::string level = level_prefix(k + 1);
    out[level + "centroids"] = data.levels[k].centroids;
    out[level + "offsets"] = bytes(data.levels[k].offsets);
    out[level + "value_means"] = data.levels[k].value_means;
  }
  if (data.classifier == nullptr) return out;
  for (const auto& part : classifier_tensors(metadata.model, metadata.buckets, metadata.hidden)) {
    out[concat("buckets.", part.name)] = bytes(data.classifier->*part.values);
  }
  return out;
}

}  // namespace

struct SqzWriter::State {
  std::string path;
  IndexMetadata metadata;
  FileLayout layout;
  AtomicFile file;
  std::vector<uint64_t> hashes;  // of layout.tensors
  std::vector<bool> written;     // layers

  // Puts contents(tensor) into each tensor of a layer that was not written yet.
  template <class Contents>
  Status put_layer(int64_t layer, Contents contents) {
    if (layer < 0 || std::cmp_greater_equal(layer, written.size())) {
      return Refuse{path, Code::kInternal}("layer", layer, concat("below ", written.size()));
    }
    if (written[static_cast<size_t>(layer)]) {
      return {Code::kInternal, concat(path, ": layer ", layer, " was written before")};
    }
    for (size_t i = 0; i < layout.tensors.size(); ++i) {
      if (layout.tensors[i].layer != layer) continue;
      SQZ_RETURN_IF_ERROR(put(i, contents(layout.tensors[i])));
    }
    written[static_cast<size_t>(layer)] = true;
    return {};
  }

  // Of the one tensor of this name.
  Status put(const std::string& name, std::span<const std::byte> data) {
    const auto at = std::find_if(layout.tensors.begin(), layout.tensors.end(),
                                 [&](const PlannedTensor& t) { return t.name == name; });
    return put(static_cast<size_t>(at - layout.tensors.begin()), data);
  }

  Status put(size_t tensor, std::span<const std::byte> data) {
    const PlannedTensor& planned = layout.tensors[tensor];
    if (data.size() != planned.bytes) {
      return Refuse{path, Code::kInternal}(planned.name, concat(data.size(), " bytes"),
                                           planned.bytes);
    }
    hashes[tensor] = xxh3_64(data);
    return file.file().write(layout.data_offset + planned.offset, data);
  }
};

SqzWriter::SqzWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
SqzWriter::~SqzWriter() = default;

Result<uint64_t> SqzWriter::planned_bytes(const IndexMetadata& metadata,
                                          const std::vector<LayerShape>& shapes) {
  IndexMetadata named = metadata;
  if (named.producer.empty()) named.producer = producer_name();
  named.version = kFormatVersion;
  if (named.tokens_hash.empty()) named.tokens_hash = hex(uint64_t{0});
  SQZ_ASSIGN_OR_RETURN(const FileLayout layout, lay_out(named, shapes, "index"));
  return layout.bytes;
}

Result<std::unique_ptr<SqzWriter>> SqzWriter::create(Env& env, const std::string& path,
                                                     bool replace, IndexMetadata metadata,
                                                     std::vector<LayerShape> shapes) {
  if (metadata.producer.empty()) metadata.producer = producer_name();
  metadata.version = kFormatVersion;
  SQZ_ASSIGN_OR_RETURN(FileLayout layout, lay_out(metadata, shapes, path));
  const size_t tensors = layout.tensors.size(), layers = metadata.layers.size();
  SQZ_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(env, path, replace));
  SQZ_RETURN_IF_ERROR(env.check_room(path, layout.bytes));  // before hours of work
  std::unique_ptr<State> state(new State{path, std::move(metadata), std::move(layout),
                                         std::move(file), std::vector<uint64_t>(tensors),
                                         std::vector<bool>(layers)});
  return std::unique_ptr<SqzWriter>(new SqzWriter(std::move(state)));
}

Status SqzWriter::write_layer(int64_t layer, const LayerData& data) {
  State& s = *state_;
  if (layer >= 0 && std::cmp_less(layer, s.written.size())) {
    const bool dense = s.metadata.layers[static_cast<size_t>(layer)].dense;
    const int64_t levels = dense ? 0 : s.metadata.levels;
    if (std::ssize(data.levels) != levels) {
      return Refuse{s.path, Code::kInternal}(concat("layers.", layer),
                                             concat(data.levels.size(), " levels"), levels);
    }
  }
  const auto contents = contents_of(data, s.metadata);
  const size_t prefix = layer_prefix(layer).size();
  return s.put_layer(layer, [&](const PlannedTensor& tensor) {
    const auto found = contents.find(tensor.name.substr(prefix));
    return found == contents.end() ? std::span<const std::byte>() : found->second;
  });
}

Status SqzWriter::copy_layer(int64_t layer, const SqzFile& from) {
  return state_->put_layer(layer,
                           [&](const PlannedTensor& tensor) { return from.tensor(tensor.name); });
}

Result<uint64_t> SqzWriter::commit(const Calibration& calibration) {
  State& s = *state_;
  const auto missing = std::find(s.written.begin(), s.written.end(), false);
  if (missing != s.written.end()) {
    return Status(Code::kInternal,
                  concat(s.path, ": layer ", missing - s.written.begin(), " was not written"));
  }
  SQZ_RETURN_IF_ERROR(check_calibration(calibration, s.metadata, s.path, Code::kInternal));
  for (const CalibrationTable& table : calibration_tables(s.metadata)) {
    SQZ_RETURN_IF_ERROR(s.put(table.name, std::as_bytes(std::span(calibration.*table.values))));
  }
  if (s.metadata.has_rotation()) {
    const auto rotation = make_rotation(s.metadata.model.head_dim, s.metadata.rotation_seed);
    SQZ_RETURN_IF_ERROR(s.put(kRotationName, std::as_bytes(std::span(rotation))));
  }

  auto& metadata = s.layout.metadata;
  metadata[kCalibrationKey] = calibration_text(calibration);
  metadata[kChecksumsKey] = checksum_text(s.layout.tensors, s.hashes);
  std::string header = header_text(metadata, s.layout.tensors);
  if (8 + header.size() > s.layout.data_offset) {
    return Refuse{s.path, Code::kInvalidArgument}(
        "calibration.source", concat(calibration.source.size(), " bytes"), "a short name");
  }
  header = sealed_header(std::move(header), s.layout.data_offset);
  const auto bytes = std::as_bytes(std::span(header));
  SQZ_RETURN_IF_ERROR(s.file.file().write(0, bytes));
  SQZ_RETURN_IF_ERROR(s.put(s.layout.tensors.size() - 1, xxh3_128(bytes)));
  SQZ_RETURN_IF_ERROR(s.file.commit());
  return s.layout.bytes;
}

}  // namespace sqz
