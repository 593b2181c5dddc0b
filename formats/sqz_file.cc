#include "formats/sqz_file.h"

#include <algorithm>
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

// `tensors` are the layer's in the plan, `file` are the file's bytes.
LayerView view_of(const IndexMetadata& metadata, const LayerShape& shape, RowKind layer_rows,
                  std::span<const PlannedTensor> tensors, const std::byte* file) {
  // Null if the plan has no such tensor. Alignment was checked against the file, whose bytes start
  // on a page in memory.
  const size_t prefix = tensors.empty() ? 0 : layer_prefix(tensors[0].layer).size();
  const auto set = [&]<class T>(const T*& pointer, std::string_view name) {
    for (const PlannedTensor& tensor : tensors) {
      if (std::string_view(tensor.name).substr(prefix) != name) continue;
      pointer = reinterpret_cast<const T*>(file + tensor.offset);
    }
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
    set(view.classifier.centroids, "buckets.centroids");
    set(view.classifier.hidden_weight, "buckets.hidden.weight");
    set(view.classifier.hidden_bias, "buckets.hidden.bias");
    set(view.classifier.output_weight, "buckets.output.weight");
    set(view.classifier.output_bias, "buckets.output.bias");
  }
  set(view.positions, "positions");
  set(view.heavy, "heavy");
  const auto set_codes = [&](CodedRows& rows, int bits, const std::string& name) {
    rows.bits = bits;
    set(rows.codes, name);
    set(rows.scales, name + ".scales");
  };
  if (view.slots > 0 && layer_rows != RowKind::k16) {
    set_codes(view.coded_keys, 8, "keys");
    set_codes(view.coded_values, value_bits(layer_rows), "values");
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

struct SqzFile::State {
  SqzContainer container;
  IndexMetadata metadata;
  std::vector<LayerView> layers;
};

SqzFile::SqzFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
SqzFile::~SqzFile() = default;

Result<std::shared_ptr<const SqzFile>> SqzFile::open(const std::string& path, OpenMode mode,
                                                     Env& env) {
  auto state = std::make_unique<State>();
  State& s = *state;
  SQZ_ASSIGN_OR_RETURN(s.container, open_container(path, FileKind::kIndex, mode, env));
  const SafetensorsHeader& header = s.container.header;
  SQZ_ASSIGN_OR_RETURN(s.metadata, metadata_from_strings(header.metadata, path));
  if (!header.metadata.contains(kCalibrationKey)) {
    return Refuse{path}(concat("__metadata__: ", kCalibrationKey), "nothing", "a value");
  }

  SQZ_ASSIGN_OR_RETURN(const auto shapes, layer_shapes(s.metadata, header, path));
  Result<std::vector<PlannedTensor>> plan = plan_tensors(s.metadata, shapes, path);
  if (!plan.ok()) return Status(Code::kCorrupt, plan.status().message());
  SQZ_RETURN_IF_ERROR(match_tensors(header, *plan, path));

  std::span<const PlannedTensor> rest(*plan);
  for (const LayerShape& shape : shapes) {
    const auto layer = std::ssize(s.layers);
    const auto end = std::find_if(rest.begin(), rest.end(),
                                  [&](const PlannedTensor& t) { return t.layer != layer; });
    const auto count = static_cast<size_t>(end - rest.begin());
    s.layers.push_back(view_of(s.metadata, shape, s.metadata.rows_of(layer), rest.first(count),
                               s.container.bytes.data()));
    s.layers.back().rotation =
        reinterpret_cast<const float*>(s.container.tensor(kRotationName).data());
    rest = rest.subspan(count);
  }
  std::shared_ptr<const SqzFile> file(new SqzFile(std::move(state)));
  if (mode == OpenMode::kVerify) {
    const Status whole = file->check_whole();
    if (!whole.ok()) return Status(whole.code(), concat(path, ": ", whole.message()));
  }
  return file;
}

const std::string& SqzFile::path() const {
  return state_->container.path;
}
uint64_t SqzFile::file_bytes() const {
  return state_->container.bytes.size();
}
const IndexMetadata& SqzFile::metadata() const {
  return state_->metadata;
}
const std::map<std::string, std::string>& SqzFile::raw_metadata() const {
  return state_->container.header.metadata;
}
const SafetensorsHeader& SqzFile::header() const {
  return state_->container.header;
}
std::span<const std::byte> SqzFile::tensor(std::string_view name) const {
  return state_->container.tensor(name);
}
LayerView SqzFile::layer(int64_t index) const {
  return state_->layers[static_cast<size_t>(index)];
}

Status SqzFile::copy(const void* at, std::span<std::byte> out) const {
  const auto* from = static_cast<const std::byte*>(at);
  const SqzContainer& container = state_->container;
  if (container.file != nullptr) {
    return container.file->read(static_cast<uint64_t>(from - container.bytes.data()), out);
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
  return calibration;
}

Result<VerifyReport> SqzFile::verify(const std::function<void(uint64_t, uint64_t)>& progress,
                                     int threads) const {
  return verify_index(*this, state_->container.bytes, progress, threads);
}

Status SqzFile::check_whole(const std::function<void(uint64_t, uint64_t)>& progress,
                            int threads) const {
  SQZ_ASSIGN_OR_RETURN(const VerifyReport report, verify(progress, threads));
  return report.problems.empty() ? Status() : Status(Code::kCorrupt, report.problems.front());
}

}  // namespace sqz
