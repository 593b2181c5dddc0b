#include "libruntime/cuda/device_index.h"

#include <algorithm>
#include <limits>

#include "formats/base/parallel.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda {
namespace {

constexpr int64_t kMostKeys =
    std::numeric_limits<int32_t>::max() - (1 << 19);  // parts look two steps past them

constexpr size_t kAlignment = 256;

// Hands out device memory and notes what belongs there.
class Placement {
 public:
  Placement(std::byte* base, std::vector<Copy>& copies) : base_(base), copies_(copies) {}

  template <class T>
  const T* take(int64_t layer, const T* from, int64_t bytes, bool of_file = true,
                int16_t most = 0) {
    if (from == nullptr || bytes == 0) return nullptr;
    std::byte* to = place(static_cast<size_t>(bytes));
    copies_.push_back({layer, from, to, static_cast<size_t>(bytes), of_file, most});
    return reinterpret_cast<const T*>(to);
  }
  template <class T>
  const T* take(int64_t layer, const std::vector<T>& from) {
    return take(layer, from.data(), static_cast<int64_t>(from.size() * sizeof(T)), false);
  }
  // Takes the weights of all heads, from [heads, rows, columns].
  const void* take_weights(int64_t layer, const float* from, int64_t heads, int64_t rows,
                           int64_t columns) {
    const auto bytes = static_cast<size_t>(weight_bytes(rows, columns));
    std::byte* first = place(static_cast<size_t>(heads) * bytes);
    for (int64_t h = 0; h < heads; ++h) {
      copies_.push_back({layer, from + h * rows * columns, first + static_cast<size_t>(h) * bytes,
                         bytes, true, 0, rows, columns});
    }
    return first;
  }
  // [heads, slots], from [heads, clusters + 1].
  const uint32_t* take_clusters(int64_t layer, const std::vector<uint32_t>& offsets, int64_t heads,
                                int64_t slots) {
    const int64_t each = std::ssize(offsets) / heads;
    const auto bytes = static_cast<size_t>(slots) * sizeof(uint32_t);
    std::byte* first = place(static_cast<size_t>(heads) * bytes);
    for (int64_t h = 0; h < heads; ++h) {
      Copy copy;
      copy.layer = layer;
      copy.from = offsets.data() + h * each;
      copy.to = first + static_cast<size_t>(h) * bytes;
      copy.bytes = bytes;
      copy.clusters = each - 1;
      copies_.push_back(copy);
    }
    return reinterpret_cast<const uint32_t*>(first);
  }
  // Rows of 8 bits.
  CodedRows take_codes(int64_t layer, const CodedRows& from, const LayerView& view, int64_t dim,
                       int16_t most_scale = 0) {
    const int64_t count = view.kv_heads * view.slots;
    const int64_t bytes = count * dtype_size(view.dtype);
    CodedRows to = {.bits = from.bits, .codes = take(layer, from.codes, count * dim)};
    const std::byte* scales =
        take(layer, static_cast<const std::byte*>(from.scales), bytes, true, most_scale);
    to.scales = scales;
    // Kernels read scales in pairs: behind an odd one is a zero.
    static constexpr uint16_t kNoScale = 0;
    if (scales != nullptr && count % 2 != 0) {
      copies_.push_back(
          {layer, &kNoScale, const_cast<std::byte*>(scales) + bytes, sizeof(kNoScale), false});
    }
    return to;
  }
  size_t used() const { return used_; }

 private:
  std::byte* place(size_t bytes) {
    std::byte* to = base_ + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return to;
  }

  std::byte* base_;
  std::vector<Copy>& copies_;
  size_t used_ = 0;
};

std::vector<uint32_t> page_offsets(const LayerView& view) {
  std::vector<uint32_t> offsets;
  for (int64_t head = 0; head < view.kv_heads && view.pages > 0; ++head) {
    for (int64_t page = 0; page <= view.pages; ++page) {
      offsets.push_back(static_cast<uint32_t>(std::min(page * view.page_size, view.slots)));
    }
  }
  return offsets;
}

ClassifierNetwork place_classifier(const LayerView& view, const LayerTable& table, int64_t layer,
                                   Placement& place) {
  const ClassifierView& from = view.classifier;
  const int64_t heads = view.kv_heads;
  ClassifierNetwork out;
  out.hidden = static_cast<int32_t>(from.hidden);
  out.hidden_weight =
      place.take_weights(layer, from.hidden_weight, heads, from.hidden, view.head_dim);
  out.hidden_bias = place.take(layer, from.hidden_bias, heads * from.hidden * 4);
  out.output_weight =
      place.take_weights(layer, from.output_weight, heads, view.buckets, from.hidden);
  out.output_bias = place.take(layer, table.bucket_bias);
  return out;
}

// Kernels number slots and keys with 32 bits, one of which is a sign. A row of tiles of weights
// must fit in a piece of the upload.
Status check_sizes(const ServedIndex& index) {
  for (const LayerView& view : index.layers) {
    if (view.slots + view.exact > kMostKeys) {
      return {Code::kUnsupported, concat("device_type 2 (CUDA): found ", view.slots + view.exact,
                                         " keys a KV head; expected at most ", kMostKeys)};
    }
    if (weight_bytes(1, view.classifier.hidden) <= static_cast<int64_t>(kPiece)) continue;
    return {Code::kUnsupported,
            concat("device_type 2 (CUDA): found a query classifier of ", view.classifier.hidden,
                   " hidden units; expected at most ", kPiece / 16)};
  }
  return {};
}

}  // namespace

size_t DeviceIndex::lay_out(std::byte* base, std::vector<Copy>& copies) {
  Placement place(base, copies);
  for (int64_t l = 0; l < std::ssize(layers_); ++l) {
    const LayerView& view = index_->layers[static_cast<size_t>(l)];
    const LayerTable& table = index_->tables[static_cast<size_t>(l)];
    const int64_t heads = view.kv_heads;
    const int64_t size = heads * dtype_size(view.dtype);
    DeviceLayer& out = layers_[static_cast<size_t>(l)];
    out.levels = view.levels;
    AttendLayer& keys = out.keys;
    const auto rows = [&](const void* from, int64_t count) {
      return place.take(l, static_cast<const std::byte*>(from), size * view.head_dim * count, true,
                        most_key(view.dtype));
    };
    const auto value_rows = [&](const void* from, int64_t count) {
      return place.take(l, static_cast<const std::byte*>(from), size * view.value_dim * count);
    };
    for (int k = 0; k < view.levels; ++k) {
      const LevelView& level = view.level[k];
      out.level[k] = {.centroids = rows(level.centroids, level.clusters),
                      .offsets = place.take(l, table.level[k].offsets),
                      .sizes = place.take(l, table.level[k].sizes),
                      .log_sizes = place.take(l, table.level[k].log_sizes),
                      .clusters = static_cast<int32_t>(level.clusters)};
    }
    out.pages = {.centroids = rows(view.page_min, view.pages),
                 .greatest = rows(view.page_max, view.pages),
                 .offsets = place.take(l, page_offsets_[static_cast<size_t>(l)]),
                 .clusters = static_cast<int32_t>(view.pages)};
    if (view.buckets > 0) {
      out.buckets = {.offsets = place.take(l, table.bucket_offsets),
                     .sizes = place.take(l, table.bucket_sizes),
                     .clusters = static_cast<int32_t>(view.buckets)};
      out.classifier = place_classifier(view, table, l, place);
    }
    keys.slots = view.slots;
    keys.exact = view.exact;
    keys.exact_keys = rows(view.exact_keys, view.exact);
    keys.exact_values = value_rows(view.exact_values, view.exact);
    keys.keys = rows(view.keys, view.slots);
    keys.values = value_rows(view.values, view.slots);
    if (view.coded_keys.bits > 0) {
      const auto finest = static_cast<size_t>(view.levels - 1);
      const LevelView& level = view.level[finest];
      keys.coded = {
          .keys =
              place.take_codes(l, view.coded_keys, view, view.head_dim, most_key_scale(view.dtype)),
          .values = place.take_codes(l, view.coded_values, view, view.value_dim),
          .clusters = place.take_clusters(l, table.level[finest].offsets, heads, view.slots),
          .mean_keys = out.level[finest].centroids,
          .mean_values = value_rows(level.value_means, level.clusters),
          .count = static_cast<int32_t>(level.clusters)};
    }
  }
  return place.used();
}

Result<std::shared_ptr<DeviceIndex>> DeviceIndex::create(std::shared_ptr<const ServedIndex> index,
                                                         const UploadOptions& options) {
  const DeviceProbe probe = probe_device(options.device);
  const Status usable = check_probe(probe, options.device);
  if (!usable.ok()) {
    return Status(usable.code(), concat("device_type 2 (CUDA): ", usable.message()));
  }
  SQZ_RETURN_IF_ERROR(check_sizes(*index));
  const CurrentDevice current(options.device);
  std::shared_ptr<DeviceIndex> out(new DeviceIndex);
  out->index_ = std::move(index);
  out->device_ = options.device;
  out->layers_.resize(out->index_->layers.size());
  for (const LayerView& view : out->index_->layers) {
    out->page_offsets_.push_back(page_offsets(view));
  }
  std::vector<Copy> copies;
  out->bytes_ = out->lay_out(nullptr, copies);
  const cudaError_t error = cudaMalloc(&out->memory_, std::max<size_t>(out->bytes_, 1));
  if (error != cudaSuccess) {
    forget(error);
    size_t free = 0, total = 0;
    forget(cudaMemGetInfo(&free, &total));
    return Status(error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal,
                  concat(out->index_->file->path(), ": its upload needs ", out->bytes_,
                         " bytes on CUDA device ", options.device, ", where ", free, " of ", total,
                         " are free: cudaMalloc: ", cudaGetErrorString(error)));
  }
  copies.clear();
  out->lay_out(static_cast<std::byte*>(out->memory_), copies);
  const int threads = options.threads > 0 ? options.threads : std::min(resolve_threads(0), 12);
  SQZ_ASSIGN_OR_RETURN(out->upload_, Upload::start(out->index_->file, options.device, threads,
                                                   std::ssize(out->layers_), copies));
  if (!options.wait) return out;
  for (int64_t l = 0; l < std::ssize(out->layers_); ++l) SQZ_RETURN_IF_ERROR(out->wait(l));
  out->upload_->join();
  return out;
}

DeviceIndex::~DeviceIndex() {
  const CurrentDevice current(device_);
  upload_.reset();
  if (memory_ != nullptr) forget(cudaFree(memory_));
}

Result<std::shared_ptr<DeviceIndex>> upload_index(std::shared_ptr<const ServedIndex> index,
                                                  const UploadOptions& options) {
  return DeviceIndex::create(std::move(index), options);
}

}  // namespace sqz::cuda
