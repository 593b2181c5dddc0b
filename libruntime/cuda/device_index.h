// An index in the memory of one GPU: one allocation, filled through pinned buffers layer by layer.
// Immutable once filled; shared by the sessions of that GPU.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/upload.h"
#include "libruntime/kernels/cuda/decode/attend/kernel.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"

namespace sqz::cuda {

// Device memory; arrays as in LayerView and LevelTable.
struct DeviceLayer {
  int levels = 0;
  std::array<LookupLevel, kMaxLevels> level;  // thresholds are the plan's
  LookupLevel pages, buckets;                 // with 0 clusters: none
  ClassifierNetwork classifier;
  AttendLayer keys;
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
