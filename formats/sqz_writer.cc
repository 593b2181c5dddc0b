#include "formats/sqz_writer.h"

#include <algorithm>

#include "formats/base/hash.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

// Room in the header for the one text that is not known at create(): the calibration's parameters.
constexpr size_t kCalibrationRoom = 2048;

struct Layout {
  std::vector<PlannedTensor> tensors;
  std::map<std::string, std::string> metadata;  // with checksums of zeros, without calibration
  uint64_t data_offset = 0;
  uint64_t bytes = 0;  // of the file
};

Result<Layout> lay_out(const IndexMetadata& metadata, const std::vector<LayerShape>& shapes,
                       const std::string& path) {
  SQZ_RETURN_IF_ERROR(check_metadata(metadata, path, Code::kInvalidArgument));
  Layout layout;
  SQZ_ASSIGN_OR_RETURN(layout.tensors, plan_tensors(metadata, shapes, path));
  SQZ_ASSIGN_OR_RETURN(layout.tensors, place_tensors(std::move(layout.tensors)));
  layout.metadata = metadata_to_strings(metadata);
  layout.metadata[kChecksumsKey] = checksum_text(layout.tensors, {});
  layout.data_offset =
      data_start(header_text(layout.metadata, layout.tensors).size() + kCalibrationRoom);
  layout.bytes = layout.data_offset + layout.tensors.back().offset + layout.tensors.back().bytes;
  return layout;
}

std::span<const std::byte> part_of(const LayerData& data, const PlannedTensor& tensor) {
  const auto level = static_cast<size_t>(tensor.level - 1);
  switch (tensor.part) {
    case Part::kCentroids:
      return data.levels[level].centroids;
    case Part::kOffsets:
      return std::as_bytes(data.levels[level].offsets);
    case Part::kValueMeans:
      return data.levels[level].value_means;
    case Part::kPageMin:
      return data.page_min;
    case Part::kPageMax:
      return data.page_max;
    case Part::kBucketOffsets:
      return std::as_bytes(data.bucket_offsets);
    case Part::kBucketCentroids:
      return std::as_bytes(std::span(data.classifier->centroids));
    case Part::kHiddenWeight:
      return std::as_bytes(std::span(data.classifier->hidden_weight));
    case Part::kHiddenBias:
      return std::as_bytes(std::span(data.classifier->hidden_bias));
    case Part::kOutputWeight:
      return std::as_bytes(std::span(data.classifier->output_weight));
    case Part::kOutputBias:
      return std::as_bytes(std::span(data.classifier->output_bias));
    case Part::kPositions:
      return std::as_bytes(data.positions);
    case Part::kHeavy:
      return std::as_bytes(data.heavy);
    case Part::kKeys:
      return data.keys;
    case Part::kValues:
      return data.values;
    case Part::kExactKeys:
      return data.exact_keys;
    case Part::kExactValues:
      return data.exact_values;
    default:
      return {};
  }
}

}  // namespace

struct SqzWriter::State {
  std::string path;
  IndexMetadata metadata;
  Layout layout;
  AtomicFile file;
  std::vector<uint64_t> hashes;  // of layout.tensors
  std::vector<bool> written;     // layers

  // `layer` is one of the index's, and not written yet.
  Status check_next(int64_t layer) const {
    if (layer < 0 || std::cmp_greater_equal(layer, written.size())) {
      return {Code::kInternal,
              bad_field(path, "layer", concat(layer), concat("below ", written.size()))};
    }
    if (!written[static_cast<size_t>(layer)]) return {};
    return {Code::kInternal, concat(path, ": layer ", layer, " was written before")};
  }

  Status put(size_t tensor, std::span<const std::byte> data) {
    const PlannedTensor& planned = layout.tensors[tensor];
    if (data.size() != planned.bytes) {
      return {Code::kInternal,
              bad_field(path, planned.name, concat(data.size(), " bytes"), concat(planned.bytes))};
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
  if (named.tokens_hash.empty()) named.tokens_hash = hex(uint64_t{0});
  SQZ_ASSIGN_OR_RETURN(const Layout layout, lay_out(named, shapes, "index"));
  return layout.bytes;
}

Result<std::unique_ptr<SqzWriter>> SqzWriter::create(Env& env, const std::string& path,
                                                     bool replace, IndexMetadata metadata,
                                                     std::vector<LayerShape> shapes) {
  if (metadata.producer.empty()) metadata.producer = producer_name();
  SQZ_ASSIGN_OR_RETURN(Layout layout, lay_out(metadata, shapes, path));
  SQZ_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(env, path, replace));
  const size_t tensors = layout.tensors.size(), layers = metadata.layers.size();
  std::unique_ptr<State> state(new State{path, std::move(metadata), std::move(layout),
                                         std::move(file), std::vector<uint64_t>(tensors),
                                         std::vector<bool>(layers)});
  return std::unique_ptr<SqzWriter>(new SqzWriter(std::move(state)));
}

Status SqzWriter::write_layer(int64_t layer, const LayerData& data) {
  State& s = *state_;
  SQZ_RETURN_IF_ERROR(s.check_next(layer));
  const auto index = static_cast<size_t>(layer);
  const size_t levels = s.metadata.layers[index].dense ? 0 : static_cast<size_t>(s.metadata.levels);
  if (data.levels.size() != levels) {
    return {Code::kInternal, bad_field(s.path, concat("layers.", layer),
                                       concat(data.levels.size(), " levels"), concat(levels))};
  }
  for (size_t i = 0; i < s.layout.tensors.size(); ++i) {
    if (s.layout.tensors[i].layer != layer) continue;
    SQZ_RETURN_IF_ERROR(s.put(i, part_of(data, s.layout.tensors[i])));
  }
  s.written[index] = true;
  return {};
}

Status SqzWriter::copy_layer(int64_t layer, const SqzFile& from) {
  State& s = *state_;
  SQZ_RETURN_IF_ERROR(s.check_next(layer));
  for (size_t i = 0; i < s.layout.tensors.size(); ++i) {
    const PlannedTensor& planned = s.layout.tensors[i];
    if (planned.layer == layer) SQZ_RETURN_IF_ERROR(s.put(i, from.tensor(planned.name)));
  }
  s.written[static_cast<size_t>(layer)] = true;
  return {};
}

Result<uint64_t> SqzWriter::commit(const Calibration& calibration) {
  State& s = *state_;
  const auto missing = std::find(s.written.begin(), s.written.end(), false);
  if (missing != s.written.end()) {
    return Status(Code::kInternal,
                  concat(s.path, ": layer ", missing - s.written.begin(), " was not written"));
  }
  SQZ_RETURN_IF_ERROR(check_calibration(calibration, s.metadata, s.path, Code::kInternal));
  for (size_t i = 0; i < s.layout.tensors.size(); ++i) {
    const Part part = s.layout.tensors[i].part;
    const std::vector<float>* table = part == Part::kThresholds      ? &calibration.thresholds
                                      : part == Part::kCoarse        ? &calibration.coarse
                                      : part == Part::kShares        ? &calibration.shares
                                      : part == Part::kKeyThresholds ? &calibration.key_thresholds
                                      : part == Part::kKeyShares     ? &calibration.key_shares
                                                                     : nullptr;
    if (table) SQZ_RETURN_IF_ERROR(s.put(i, std::as_bytes(std::span(*table))));
  }

  auto& metadata = s.layout.metadata;
  metadata[kCalibrationKey] = calibration_text(calibration);
  metadata[kChecksumsKey] = checksum_text(s.layout.tensors, s.hashes);
  std::string header = header_text(metadata, s.layout.tensors);
  if (8 + header.size() > s.layout.data_offset) {
    return Status(Code::kInvalidArgument,
                  bad_field(s.path, "calibration.source",
                            concat(calibration.source.size(), " bytes"), "a short name"));
  }
  header = sealed_header(std::move(header), s.layout.data_offset);
  const auto bytes = std::as_bytes(std::span(header));
  SQZ_RETURN_IF_ERROR(s.file.file().write(0, bytes));
  SQZ_RETURN_IF_ERROR(s.put(s.layout.tensors.size() - 1, xxh3_128(bytes)));
  SQZ_RETURN_IF_ERROR(s.file.commit());
  return s.layout.bytes;
}

}  // namespace sqz
