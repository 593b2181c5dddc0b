// An index in the memory of one GPU: one allocation, filled through pinned buffers layer by layer.
// Immutable once filled; shared by the sessions of that GPU.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/upload.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"

namespace sqz::cuda {

// Device memory; arrays as in LayerView and LevelTable.
struct DeviceLevel {
  int64_t clusters = 0;               // n_k
  const void* centroids = nullptr;    // [Hkv, n_k, d] bf16 or f16
  const void* value_means = nullptr;  // [Hkv, n_k, dv]; null if the index has none
  const uint32_t* offsets = nullptr;  // [Hkv, n_k + 1]: first child, or first slot
  const uint32_t* sizes = nullptr;    // [Hkv, n_k]: keys below
  const float* log_sizes = nullptr;   // [Hkv, n_k], natural
};

struct DeviceLayer {
  int levels = 0;
  std::array<DeviceLevel, kMaxLevels> level;
  int64_t page_size = 0, pages = 0;          // P pages; 0 = none
  const void* page_min = nullptr;            // [Hkv, P, d]
  const void* page_max = nullptr;            // [Hkv, P, d]
  const uint32_t* page_offsets = nullptr;    // [Hkv, P + 1]: first slot of each page
  int64_t buckets = 0;                       // C; 0 = none
  const uint32_t* bucket_offsets = nullptr;  // [Hkv, C + 1]
  const uint32_t* bucket_sizes = nullptr;    // [Hkv, C]
  ClassifierNetwork classifier;
  int64_t slots = 0;                    // M
  const uint32_t* positions = nullptr;  // [Hkv, M]
  const void* keys = nullptr;           // [Hkv, M, d]
  const void* values = nullptr;         // [Hkv, M, dv]
  // Rows of 8 bits in their place, device pointers; bits 0: none.
  CodedRows coded_keys, coded_values;
  const uint32_t* clusters_of_slots = nullptr;  // [Hkv, M] as CodedSource::clusters; rows of codes
  int64_t exact = 0;                            // E
  const void* exact_keys = nullptr;             // [Hkv, E, d]
  const void* exact_values = nullptr;           // [Hkv, E, dv]
};

class DeviceIndex {
 public:
  static Result<std::shared_ptr<DeviceIndex>> create(std::shared_ptr<const ServedIndex> index,
                                                     const UploadOptions& options);
  // Waits for the copies that are under way.
  ~DeviceIndex();
  DeviceIndex(const DeviceIndex&) = delete;
  DeviceIndex& operator=(const DeviceIndex&) = delete;

  int device() const { return device_; }
  const DeviceLayer& layer(int64_t index) const { return layers_[static_cast<size_t>(index)]; }
  size_t bytes() const { return bytes_; }
  // Returns once the layer is there, or with the error that the upload met.
  Status wait(int64_t layer) { return upload_->wait(layer); }
  // Then: whether its keys are small enough for kernels that do not look for overflow.
  bool has_usual_keys(int64_t layer) const { return !upload_->has_large(layer); }

 private:
  DeviceIndex() = default;
  // Lays the layers out from `base`; from null it only counts. Returns the bytes.
  size_t lay_out(std::byte* base, std::vector<Copy>& copies);

  std::shared_ptr<const ServedIndex> index_;
  int device_ = 0;
  std::vector<DeviceLayer> layers_;
  std::vector<std::vector<uint32_t>> page_offsets_;  // what the file does not store, by layer
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  std::unique_ptr<Upload> upload_;
};

}  // namespace sqz::cuda
