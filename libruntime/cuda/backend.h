// The CUDA backend as the C ABI sees it; no CUDA header behind it. A build without CUDA has
// libruntime/without/cuda_backend.cc in its place.
#pragma once

#include <memory>

#include "libruntime/rope.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// An index in the memory of one GPU; freed with the last reference.
class DeviceIndex;

struct UploadOptions {
  int device = 0;
  int threads = 0;   // that copy; 0 = 12, or as many as the machine has
  bool wait = true;  // false: return as soon as layer 0 can be used
};

// kUnsupported: no usable GPU, or this build is without CUDA; kOutOfMemory says what was needed.
// After an error nothing is allocated.
Result<std::shared_ptr<DeviceIndex>> upload_index(std::shared_ptr<const ServedIndex> index,
                                                  const UploadOptions& options);

Result<std::unique_ptr<ServingSession>> create_session(std::shared_ptr<const ServedIndex> index,
                                                       std::shared_ptr<DeviceIndex> uploaded,
                                                       const SessionOptions& options);

// Memory of a GPU, freed with the last reference, which waits for the work that uses it.
Result<std::shared_ptr<void>> device_memory(int gpu, size_t bytes);

// RopeUndo::apply() of one position to `rows` rows of `dtype`, [rows, dim], on device `gpu`:
// returns at once.
Status turn_rows(int gpu, const RopeUndo& rope, int64_t position, DType dtype, int64_t rows,
                 int64_t dim, const void* from, void* to, void* stream);

// merge_rows() (libruntime/attention/attend.h) on device `gpu`: returns at once, and rows with a
// NaN or infinite lse become NaN. sinks: device memory.
Status merge_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out_a,
                    const LseRows& lse_a, const void* out_b, const ConstLseRows& lse_b,
                    const Sinks& sinks, void* stream);

// The state of queries without a context on device `gpu`: out [rows, dim] 0, lse -infinity.
Status clear_states(int gpu, DType dtype, int64_t rows, int64_t dim, void* out, const LseRows& lse,
                    void* stream);

}  // namespace sqz::cuda
