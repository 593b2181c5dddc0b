#include "formats/sqz_file.h"

#include <algorithm>
#include <cstring>

#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"
#include "formats/sqz_verify.h"

namespace sqz {
namespace {

Status corrupt(std::string message) {
  return {Code::kCorrupt, std::move(message)};
}

// n_k of every sparse layer, from the centroids' shapes; the rest follows from the metadata.
Result<std::vector<LayerShape>> layer_shapes(const IndexMetadata& metadata,
                                             const SafetensorsHeader& header,
                                             const std::string& path) {
  std::vector<LayerShape> shapes(metadata.layers.size());
  for (size_t l = 0; l < shapes.size(); ++l) {
    const LayerPolicy& policy = metadata.layers[l];
    if (policy.dense) {
      shapes[l].exact =
          policy.window > 0 ? std::min(policy.window, metadata.tokens) : metadata.tokens;
      continue;
    }
    shapes[l].slots =
        metadata.pruned ? policy.kept : metadata.tokens - metadata.sink - metadata.tail;
    shapes[l].exact = metadata.sink + metadata.tail;
    // Pages and buckets have no levels.
    for (int k = 1; k <= metadata.levels; ++k) {
      const std::string name = concat("layers.", l, ".level.", k, ".centroids");
      const TensorInfo* centroids = header.find(name);
      if (!centroids || centroids->shape.size() != 3) {
        return corrupt(bad_field(
            path, "tensor " + in_quotes(name), centroids ? shape_text(centroids->shape) : "nothing",
            concat("[", metadata.model.kv_heads, ", clusters, ", metadata.model.head_dim, "]")));
      }
      shapes[l].clusters.push_back(centroids->shape[1]);
    }
  }
  return shapes;
}

void set_pointer(LayerView& view, const PlannedTensor& tensor, const std::byte* data) {
  LevelView* level =
      tensor.level > 0 ? &view.level[static_cast<size_t>(tensor.level - 1)] : nullptr;
  // Alignment was checked against the file, whose bytes start on a page in memory.
  const auto* numbers = reinterpret_cast<const uint32_t*>(data);
  const auto* floats = reinterpret_cast<const float*>(data);
  switch (tensor.part) {
    case Part::kCentroids:
      level->centroids = data;
      level->clusters = tensor.shape[1];
      view.levels = std::max(view.levels, tensor.level);
      break;
    case Part::kOffsets:
      level->offsets = numbers;
      break;
    case Part::kValueMeans:
      level->value_means = data;
      break;
    case Part::kPageMin:
      view.page_min = data;
      view.pages = tensor.shape[1];
      break;
    case Part::kPageMax:
      view.page_max = data;
      break;
    case Part::kBucketOffsets:
      view.bucket_offsets = numbers;
      view.buckets = tensor.shape[1] - 1;
      break;
    case Part::kBucketCentroids:
      view.classifier.centroids = floats;
      break;
    case Part::kHiddenWeight:
      view.classifier.hidden_weight = floats;
      view.classifier.hidden = tensor.shape[1];
      break;
    case Part::kHiddenBias:
      view.classifier.hidden_bias = floats;
      break;
    case Part::kOutputWeight:
      view.classifier.output_weight = floats;
      break;
    case Part::kOutputBias:
      view.classifier.output_bias = floats;
      break;
    case Part::kPositions:
      view.positions = numbers;
      break;
    case Part::kHeavy:
      view.heavy = numbers;
      break;
    case Part::kKeys:
      view.keys = data;
      break;
    case Part::kValues:
      view.values = data;
      break;
    case Part::kExactKeys:
      view.exact_keys = data;
      break;
    case Part::kExactValues:
      view.exact_values = data;
      break;
    default:
      break;
  }
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
  const auto& strings = header.metadata;
  SQZ_ASSIGN_OR_RETURN(s.metadata, metadata_from_strings(strings, path));
  if (!strings.contains(kCalibrationKey)) {
    return corrupt(bad_field(path + ": __metadata__", kCalibrationKey, "nothing", "a value"));
  }

  SQZ_ASSIGN_OR_RETURN(const auto shapes, layer_shapes(s.metadata, header, path));
  Result<std::vector<PlannedTensor>> plan = plan_tensors(s.metadata, shapes, path);
  if (!plan.ok()) return corrupt(plan.status().message());
  SQZ_RETURN_IF_ERROR(match_tensors(header, *plan, path));

  s.layers.resize(shapes.size());
  for (size_t l = 0; l < shapes.size(); ++l) {
    LayerView& view = s.layers[l];
    view.dtype = s.metadata.dtype;
    view.kv_heads = s.metadata.model.kv_heads;
    view.head_dim = s.metadata.model.head_dim;
    view.slots = shapes[l].slots;
    view.exact = shapes[l].exact;
    view.page_size = view.slots > 0 ? s.metadata.page_size : 0;
  }
  for (const PlannedTensor& tensor : *plan) {
    if (tensor.layer < 0) continue;
    set_pointer(s.layers[static_cast<size_t>(tensor.layer)], tensor,
                s.container.bytes.data() + tensor.offset);
  }
  return std::shared_ptr<const SqzFile>(new SqzFile(std::move(state)));
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
  const auto copy = [&](const char* name, std::vector<float>& out) {
    const std::span<const std::byte> bytes = tensor(name);
    if (bytes.empty()) return;  // the index has no such curves
    out.resize(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
  };
  copy("calibration.thresholds", calibration.thresholds);
  copy("calibration.coarse", calibration.coarse);
  copy("calibration.shares", calibration.shares);
  copy("calibration.keys.thresholds", calibration.key_thresholds);
  copy("calibration.keys.shares", calibration.key_shares);
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
