// In place of libruntime/cuda/ where sqz is built without CUDA.
#include "libruntime/cuda/backend.h"

namespace sqz::cuda {
namespace {

Status missing() {
  return {Code::kUnsupported,
          "device_type 2 (CUDA): this libsqz was built without CUDA; build it with -DSQZ_CUDA=ON, "
          "or serve on the CPU"};
}

}  // namespace

class DeviceIndex {};

Result<std::shared_ptr<DeviceIndex>> upload_index(std::shared_ptr<const ServedIndex>,
                                                  const UploadOptions&) {
  return missing();
}

Result<std::unique_ptr<ServingSession>> create_session(std::shared_ptr<const ServedIndex>,
                                                       std::shared_ptr<DeviceIndex>,
                                                       const SessionOptions&) {
  return missing();
}

Result<std::unique_ptr<ContextTable>> create_context_table(const ServingSession&,
                                                           const ContextTableOptions&) {
  return missing();
}

Result<std::shared_ptr<void>> device_memory(int, size_t) {
  return missing();
}

Status turn_rows(int, const RopeUndo&, int64_t, DType, int64_t, int64_t, const void*, void*,
                 void*) {
  return missing();
}

Status merge_states(int, DType, int64_t, int64_t, void*, const LseRows&, const void*,
                    const ConstLseRows&, const Sinks&, void*) {
  return missing();
}

Status clear_states(int, DType, int64_t, int64_t, void*, const LseRows&, void*) {
  return missing();
}

}  // namespace sqz::cuda
