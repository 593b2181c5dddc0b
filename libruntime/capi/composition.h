// Requests with several contexts: their queries, turned to where a context begins, and the states
// that are merged into the outputs. The memory for both is taken once, on the CPU or a GPU.
#pragma once

#include <memory>

#include "libruntime/rope.h"
#include "libruntime/session/serving_session.h"

namespace sqz::capi {

class Composition {
 public:
  // device: a CUDA device, or -1. `pool` serves the CPU and is null on a GPU. kOutOfMemory.
  static Result<std::unique_ptr<Composition>> create(const ModelDescription& model,
                                                     int64_t max_tokens, int device,
                                                     std::shared_ptr<ThreadPool> pool);

  const RopeUndo& shift() const { return shift_; }
  // The same call with queries that are turned back by its offset. They are overwritten by the next
  // call of this function.
  Result<AttendCall> turned(const AttendCall& call);
  // The same call with outputs of its own. They are overwritten by the next such call.
  AttendCall apart(const AttendCall& call) const;
  // Merges the outputs of `apart` into those of `call`.
  Status merge(const AttendCall& call, const AttendCall& apart) const;

 private:
  Composition(const ModelDescription& model, int device, std::shared_ptr<ThreadPool> pool);

  const int device_;
  std::shared_ptr<ThreadPool> pool_;
  RopeUndo shift_;
  std::shared_ptr<void> memory_;
  std::byte *q_ = nullptr,
            *out_ = nullptr;       // [max_tokens, Hq, d], of up to 4 bytes, of the largest layer
  float* lse_ = nullptr;           // [max_tokens, Hq]
  std::unique_ptr<float[]> rows_;  // [threads, Hq + 1, d], CPU
};

}  // namespace sqz::capi
