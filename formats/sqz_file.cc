#include "formats/sqz_file.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "formats/base/hash.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"
#include "formats/sqz_verify.h"

namespace sqz {
namespace {

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using PageBuffer = std::unique_ptr<std::byte, Free>;

Status corrupt(std::string message) {
  return {Code::kCorrupt, std::move(message)};
}

Result<PageBuffer> read_all(const ReadFile& file) {
  const auto size = static_cast<size_t>(file.size());
  void* memory = nullptr;
  if (::posix_memalign(&memory, kPage, std::max<size_t>(size, 1)) != 0) {
    return Status(Code::kOutOfMemory,
                  concat(file.path(), ": no memory for its ", size, " bytes; open it mapped"));
  }
  PageBuffer buffer(static_cast<std::byte*>(memory));
  SQZ_RETURN_IF_ERROR(file.read(0, {buffer.get(), size}));
  return buffer;
}

// What a user most likely did: named some other file. Says so in words, before the parser complains
// about the length of a header that is not one.
Status refuse_foreign(std::span<const std::byte> bytes, const std::string& path) {
  if (bytes.empty()) return corrupt(path + ": not an index: the file is empty");
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  // As a length, eight characters of text would be more than 2^56.
  const std::string_view first = text.substr(0, 8);
  const bool length_is_text = std::all_of(first.begin(), first.end(), [](char c) {
    return (c >= ' ' && c <= '~') || (c >= '\t' && c <= '\r');
  });
  if (!length_is_text) return {};
  return corrupt(concat(path, ": not an index: it begins with ", in_quotes(text.substr(0, 16)),
                        ", expected a safetensors header"));
}

Status check_header_hash(const SafetensorsHeader& header, std::span<const std::byte> bytes,
                         const std::string& path) {
  const auto is_hash = [](const TensorInfo& tensor) { return tensor.name == kHeaderHashName; };
  if (header.tensors.empty() || !is_hash(header.tensors.back()) ||
      header.tensors.back().bytes != 16) {
    return corrupt(
        bad_field(path, "last tensor",
                  header.tensors.empty() ? "none" : in_quotes(header.tensors.back().name),
                  concat(in_quotes(kHeaderHashName), " with 16 bytes")));
  }
  const auto stored = bytes.subspan(static_cast<size_t>(header.tensors.back().offset), 16);
  const auto actual = xxh3_128(bytes.first(static_cast<size_t>(header.data_offset)));
  if (std::memcmp(stored.data(), actual.data(), 16) != 0) {
    return corrupt(
        bad_field(path, "hash of the header", hex(actual),
                  concat(hex(stored), ", as stored: the header was changed or damaged")));
  }
  return {};
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
    shapes[l].slots = metadata.tokens - metadata.sink - metadata.tail;
    shapes[l].exact = metadata.sink + metadata.tail;
    // Pages have no levels.
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

// The file's tensors against the plan: same names, dtypes and shapes in the same order, paddings
// between them as it likes.
Status match_tensors(const SafetensorsHeader& header, std::vector<PlannedTensor>& plan,
                     const std::string& path) {
  if (header.data_offset % kPage != 0) {
    return corrupt(bad_field(path, "start of the data", concat("byte ", header.data_offset),
                             concat("a multiple of ", kPage)));
  }
  size_t next = 0;
  for (const TensorInfo& found : header.tensors) {
    const std::string field = "tensor " + in_quotes(found.name);
    if (found.name.starts_with(kPaddingPrefix)) {
      if (found.dtype != DType::kU8 || found.shape.size() != 1) {
        return corrupt(bad_field(path, field,
                                 concat(dtype_name(found.dtype), shape_text(found.shape)),
                                 "a padding: U8, one dimension"));
      }
      continue;
    }
    if (next == plan.size()) {
      return corrupt(bad_field(path, field, "a tensor too many", "the end of the file"));
    }
    PlannedTensor& want = plan[next++];
    if (found.name != want.name) {
      return corrupt(bad_field(path, field, "it", "tensor " + in_quotes(want.name) + " here"));
    }
    if (found.dtype != want.dtype || found.shape != want.shape) {
      return corrupt(bad_field(path, field,
                               concat(dtype_name(found.dtype), shape_text(found.shape)),
                               concat(dtype_name(want.dtype), shape_text(want.shape))));
    }
    if (found.offset % want.alignment != 0) {
      return corrupt(bad_field(path, field + ": offset", concat("byte ", found.offset),
                               concat("a multiple of ", want.alignment)));
    }
    want.offset = found.offset;
  }
  if (next < plan.size()) {
    return corrupt(bad_field(path, "tensor " + in_quotes(plan[next].name), "nothing", "it"));
  }
  return {};
}

void set_pointer(LayerView& view, const PlannedTensor& tensor, const std::byte* data) {
  LevelView* level =
      tensor.level > 0 ? &view.level[static_cast<size_t>(tensor.level - 1)] : nullptr;
  // Alignment was checked against the file, whose bytes start on a page in memory.
  const auto* numbers = reinterpret_cast<const uint32_t*>(data);
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
    case Part::kPositions:
      view.positions = numbers;
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
  std::string path;
  std::unique_ptr<ReadFile> file;    // of the mapping
  std::unique_ptr<Mapping> mapping;  // one of the two holds `bytes`
  PageBuffer buffer;
  std::span<const std::byte> bytes;
  SafetensorsHeader header;
  IndexMetadata metadata;
  std::vector<LayerView> layers;
};

SqzFile::SqzFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
SqzFile::~SqzFile() = default;

Result<std::shared_ptr<const SqzFile>> SqzFile::open(const std::string& path, OpenMode mode,
                                                     Env& env) {
  auto state = std::make_unique<State>();
  State& s = *state;
  s.path = path;
  SQZ_ASSIGN_OR_RETURN(auto file, env.open_read(path));
  if (mode == OpenMode::kMmap) {
    SQZ_ASSIGN_OR_RETURN(s.mapping, file->map());
    s.bytes = s.mapping->bytes();
    s.file = std::move(file);
  } else {
    SQZ_ASSIGN_OR_RETURN(s.buffer, read_all(*file));
    s.bytes = {s.buffer.get(), static_cast<size_t>(file->size())};
  }

  SQZ_RETURN_IF_ERROR(refuse_foreign(s.bytes, path));
  SQZ_ASSIGN_OR_RETURN(s.header, parse_safetensors_header(s.bytes, s.bytes.size(), path));
  const auto& strings = s.header.metadata;
  SQZ_RETURN_IF_ERROR(check_format(strings, path));
  SQZ_RETURN_IF_ERROR(check_header_hash(s.header, s.bytes, path));
  SQZ_ASSIGN_OR_RETURN(s.metadata, metadata_from_strings(strings, path));
  for (const char* key : {kChecksumsKey, kCalibrationKey}) {
    if (!strings.contains(key)) {
      return corrupt(bad_field(path + ": __metadata__", key, "nothing", "a value"));
    }
  }

  SQZ_ASSIGN_OR_RETURN(const auto shapes, layer_shapes(s.metadata, s.header, path));
  Result<std::vector<PlannedTensor>> plan = plan_tensors(s.metadata, shapes, path);
  if (!plan.ok()) return corrupt(plan.status().message());
  SQZ_RETURN_IF_ERROR(match_tensors(s.header, *plan, path));

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
                s.bytes.data() + tensor.offset);
  }
  return std::shared_ptr<const SqzFile>(new SqzFile(std::move(state)));
}

const std::string& SqzFile::path() const {
  return state_->path;
}
uint64_t SqzFile::file_bytes() const {
  return state_->bytes.size();
}
const IndexMetadata& SqzFile::metadata() const {
  return state_->metadata;
}
const std::map<std::string, std::string>& SqzFile::raw_metadata() const {
  return state_->header.metadata;
}
const SafetensorsHeader& SqzFile::header() const {
  return state_->header;
}
std::span<const std::byte> SqzFile::tensor(std::string_view name) const {
  const TensorInfo* info = state_->header.find(name);
  return info ? state_->bytes.subspan(info->offset, info->bytes) : std::span<const std::byte>();
}
LayerView SqzFile::layer(int64_t index) const {
  return state_->layers[static_cast<size_t>(index)];
}

Status SqzFile::copy(const void* at, std::span<std::byte> out) const {
  const auto* from = static_cast<const std::byte*>(at);
  if (state_->file != nullptr) {
    return state_->file->read(static_cast<uint64_t>(from - state_->bytes.data()), out);
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
  return verify_index(*this, state_->bytes, progress, threads);
}

}  // namespace sqz
