#include "formats/sqz_file.h"

#include <charconv>
#include <cstring>

#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

// n_k of every sparse layer, from the centroids' shapes; the other sizes follow from the metadata.
Result<ClusterCounts> cluster_counts(const IndexMetadata& metadata, const SafetensorsHeader& header,
                                     const std::string& path) {
  ClusterCounts out(metadata.layers.size());
  for (size_t l = 0; l < out.size(); ++l) {
    for (int k = 1; k <= metadata.levels && !metadata.layers[l].dense; ++k) {
      const std::string name =
          concat(layer_prefix(static_cast<int64_t>(l)), level_prefix(k), "centroids");
      const TensorInfo* centroids = header.find(name);
      if (!centroids || centroids->shape.size() != 3) {
        return Refuse{path}(
            "tensor " + in_quotes(name), centroids ? shape_text(centroids->shape) : "nothing",
            concat("[", metadata.model.kv_heads, ", clusters, ", metadata.model.head_dim, "]"));
      }
      out[l].push_back(centroids->shape[1]);
    }
  }
  return out;
}

// The names and shapes of each layer's state; empty if there is none.
std::vector<std::vector<StateTensor>> state_of(const IndexMetadata& metadata,
                                               const SafetensorsHeader& header) {
  std::vector<std::vector<StateTensor>> out;
  for (const TensorInfo& tensor : header.tensors) {
    const std::string_view name = tensor.name;
    const size_t at = name.find(kStatePrefix);
    size_t layer = 0;
    if (metadata.version < kVersionOfLayers || at == name.npos || !name.starts_with("layers.")) {
      continue;
    }
    std::from_chars(name.data() + 7, name.data() + at, layer);
    if (layer >= metadata.layers.size()) continue;
    out.resize(metadata.layers.size());
    out[layer].push_back(
        {std::string(name.substr(at + std::strlen(kStatePrefix))), tensor.dtype, tensor.shape});
  }
  return out;
}

std::span<const float> floats_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

}  // namespace

Result<std::shared_ptr<const SqzFile>> SqzFile::open(const std::string& path, OpenMode mode,
                                                     Env& env) {
  std::shared_ptr<SqzFile> file(new SqzFile);
  SqzFile& s = *file;
  SQZ_ASSIGN_OR_RETURN(s.container_, open_container(path, FileKind::kIndex, mode, env));
  const SafetensorsHeader& header = s.container_.header;
  SQZ_ASSIGN_OR_RETURN(s.metadata_, read_metadata(s.container_.fields()));
  if (!header.metadata.contains(kCalibrationKey)) {
    return Refuse{path}(concat("__metadata__: ", kCalibrationKey), "nothing", "a value");
  }

  s.metadata_.state = state_of(s.metadata_, header);
  SQZ_ASSIGN_OR_RETURN(const ClusterCounts clusters, cluster_counts(s.metadata_, header, path));
  SQZ_RETURN_IF_ERROR(match_tensors(header, plan_tensors(s.metadata_, clusters, path), path));
  for (const std::vector<int64_t>& own : clusters) {
    const int64_t layer = std::ssize(s.layers_);
    LayerView view = layer_shape(s.metadata_, layer, own);
    each_tensor(s.metadata_, view, [&](const std::string& name, auto& pointer, DType, const Dims&) {
      // Aligned: match_tensors() saw to the place in the file, which starts on a page in memory.
      pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(
          s.tensor(layer_prefix(layer) + name).data());
    });
    for (StateTensor& state : view.state) {
      state.data = s.tensor(layer_prefix(layer) + kStatePrefix + state.name).data();
    }
    s.layers_.push_back(std::move(view));
  }
  if (mode == OpenMode::kVerify) SQZ_RETURN_IF_ERROR(file->verify());
  return std::shared_ptr<const SqzFile>(std::move(file));
}

Status SqzFile::copy(const void* at, std::span<std::byte> out) const {
  const auto* from = static_cast<const std::byte*>(at);
  if (container_.file != nullptr) {
    return container_.file->read(static_cast<uint64_t>(from - container_.bytes.data()), out);
  }
  std::memcpy(out.data(), from, out.size());
  return {};
}

Result<Calibration> SqzFile::checked_calibration() const {
  SQZ_ASSIGN_OR_RETURN(Calibration calibration,
                       read_calibration(container_.fields(), metadata().levels));
  SQZ_RETURN_IF_ERROR(check_calibration(
      calibration, [&](const CalibrationTable& table) { return floats_of(tensor(table.name)); },
      metadata(), path(), Code::kCorrupt));
  return calibration;
}

Result<Calibration> SqzFile::calibration() const {
  SQZ_ASSIGN_OR_RETURN(Calibration calibration, checked_calibration());
  for (const CalibrationTable& table : calibration_tables(metadata())) {
    const std::span<const float> values = floats_of(tensor(table.name));
    (calibration.*table.values).assign(values.begin(), values.end());
  }
  drop_old_policies(metadata(), calibration);
  return calibration;
}

}  // namespace sqz
