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

// The contexts of a session for calls whose requests name them in device memory.
class ContextTable {
 public:
  virtual ~ContextTable() = default;
  // Puts a session's context into a slot below `slots`; null empties it. kUnsupported for what the
  // table's kernels do not serve. Calls under way that read the old context go on reading its
  // index.
  virtual Status put(int64_t slot, const ServingSession* session) = 0;
  // One token a request. contexts: [tokens, each] of sqz_context in device memory.
  virtual Status attend(const AttendCall& call, const void* contexts, int64_t each) = 0;
};

struct ContextTableOptions {
  int64_t slots = 0, requests = 0,
          each = 1;                 // most slots, most requests of a call, contexts of one
  int64_t tokens = 0;               // most of a context; 0 = those of the first
  bool counts = true;               // the rule kBudget, else kThreshold
  const RopeUndo* shift = nullptr;  // null: contexts have no offset and no skipped tokens
};

// `first`: the session of slot 0, on a GPU. kUnsupported: its GPU or selector has no such calls.
Result<std::unique_ptr<ContextTable>> create_context_table(const ServingSession& first,
                                                           const ContextTableOptions& options);

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
