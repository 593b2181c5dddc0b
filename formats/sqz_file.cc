#include "formats/sqz_file.h"

#include <cstring>

#include "formats/sqz_checksums.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

// n_k of every sparse layer, from the centroids' shapes; the rest follows from the metadata.
Result<std::vector<LayerShape>> layer_shapes(const IndexMetadata& metadata,
                                             const SafetensorsHeader& header,
                                             const std::string& path) {
  std::vector<LayerShape> shapes;
  for (int64_t l = 0; std::cmp_less(l, metadata.layers.size()); ++l) {
    shapes.push_back(shape_without_clusters(metadata, l));
    const bool dense = metadata.layers[static_cast<size_t>(l)].dense;
    for (int k = 1; k <= metadata.levels && !dense; ++k) {
      const std::string name = layer_prefix(l) + level_prefix(static_cast<size_t>(k)) + "centroids";
      const TensorInfo* centroids = header.find(name);
      if (!centroids || centroids->shape.size() != 3) {
        return Refuse{path}(
            "tensor " + in_quotes(name), centroids ? shape_text(centroids->shape) : "nothing",
            concat("[", metadata.model.kv_heads, ", clusters, ", metadata.model.head_dim, "]"));
      }
      shapes.back().clusters.push_back(centroids->shape[1]);
    }
  }
  return shapes;
}

LayerView view_of(const IndexMetadata& metadata, int64_t layer, const LayerShape& shape,
                  const SqzContainer& file) {
  // Null if there is no such tensor. Alignment was checked against the file, whose bytes start on a
  // page in memory.
  const std::string prefix = layer_prefix(layer);
  const auto set = [&]<class T>(const T*& pointer, const std::string& name) {
    pointer = reinterpret_cast<const T*>(file.tensor(prefix + name).data());
  };
  LayerView view;
  view.dtype = metadata.dtype;
  view.kv_heads = metadata.model.kv_heads;
  view.head_dim = metadata.model.head_dim;
  view.slots = shape.slots;
  view.exact = shape.exact;
  view.levels = static_cast<int>(shape.clusters.size());
  for (size_t k = 0; k < shape.clusters.size(); ++k) {
    const std::string name = level_prefix(k + 1);
    view.level[k].clusters = shape.clusters[k];
    set(view.level[k].centroids, name + "centroids");
    set(view.level[k].offsets, name + "offsets");
    set(view.level[k].value_means, name + "value_means");
  }
  if (view.slots > 0 && metadata.partition == Partition::kPages) {
    view.page_size = metadata.page_size;
    view.pages = page_count(view.slots, view.page_size);
    set(view.page_min, "pages.min");
    set(view.page_max, "pages.max");
  }
  if (view.slots > 0 && metadata.partition == Partition::kBuckets) {
    view.buckets = metadata.buckets;
    view.classifier.hidden = metadata.hidden;
    set(view.bucket_offsets, "buckets.offsets");
    for (const auto& part : classifier_tensors(metadata.model, view.buckets, metadata.hidden)) {
      set(view.classifier.*part.view, concat("buckets.", part.name));
    }
  }
  set(view.positions, "positions");
  set(view.heavy, "heavy");
  view.rotation = reinterpret_cast<const float*>(file.tensor(kRotationName).data());
  const RowKind layer_rows = metadata.rows_of(layer);
  const auto set_codes = [&](CodedRows& rows, int bits, const std::string& name) {
    rows.bits = bits;
    set(rows.codes, name);
    set(rows.scales, name + ".scales");
  };
  if (view.slots > 0 && layer_rows != RowKind::k16) {
    set_codes(view.coded_keys, 8, "keys");
    set_codes(view.coded_values, 8, "values");
  } else {
    set(view.keys, "keys");
    set(view.values, "values");
  }
  if (view.slots > 0 && metadata.key_codes > 0) {
    set_codes(view.key_codes, metadata.key_codes, "key_codes");
  }
  set(view.exact_keys, "exact.keys");
  set(view.exact_values, "exact.values");
  return view;
}

}  // namespace

Result<std::shared_ptr<const SqzFile>> SqzFile::open(const std::string& path, OpenMode mode,
                                                     Env& env) {
  std::shared_ptr<SqzFile> file(new SqzFile);
  SqzFile& s = *file;
  SQZ_ASSIGN_OR_RETURN(s.container_, open_container(path, FileKind::kIndex, mode, env));
  const SafetensorsHeader& header = s.container_.header;
  SQZ_ASSIGN_OR_RETURN(s.metadata_, metadata_from_strings(header.metadata, path));
  if (!header.metadata.contains(kCalibrationKey)) {
    return Refuse{path}(concat("__metadata__: ", kCalibrationKey), "nothing", "a value");
  }

  SQZ_ASSIGN_OR_RETURN(const auto shapes, layer_shapes(s.metadata_, header, path));
  SQZ_RETURN_IF_ERROR(match_tensors(header, plan_tensors(s.metadata_, shapes, path), path));
  for (const LayerShape& shape : shapes) {
    s.layers_.push_back(view_of(s.metadata_, std::ssize(s.layers_), shape, s.container_));
  }
  if (mode == OpenMode::kVerify) SQZ_RETURN_IF_ERROR(file->check_whole());
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

Result<Calibration> SqzFile::calibration() const {
  Calibration calibration;
  SQZ_RETURN_IF_ERROR(parse_calibration_text(raw_metadata().at(kCalibrationKey), metadata().levels,
                                             path(), calibration));
  for (const CalibrationTable& table : calibration_tables(metadata())) {
    const std::span<const std::byte> bytes = tensor(table.name);
    std::vector<float>& out = calibration.*table.values;
    out.resize(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
  }
  SQZ_RETURN_IF_ERROR(check_calibration(calibration, metadata(), path(), Code::kCorrupt));
  drop_old_policies(metadata(), calibration);
  return calibration;
}

Result<VerifyReport> SqzFile::verify(const std::function<void(uint64_t, uint64_t)>& progress,
                                     int threads) const {
  return verify_index(*this, container_.bytes, progress, threads);
}

Status SqzFile::check_whole(const std::function<void(uint64_t, uint64_t)>& progress,
                            int threads) const {
  SQZ_ASSIGN_OR_RETURN(const VerifyReport report, verify(progress, threads));
  return first_of(report.problems, path(), Code::kCorrupt);
}

}  // namespace sqz
