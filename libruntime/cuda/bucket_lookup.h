// Lookups of the selector saap: the queries before RoPE of a call, or its queries and positions, go
// through the networks of a layer (kernels/cuda/prefill/classify), stretch by stretch of the call.
#pragma once

#include <memory>

#include "libruntime/cuda/block_chunks.h"
#include "libruntime/cuda/server_setup.h"
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"
#include "libruntime/rope.h"

namespace sqz::cuda {

class BucketLookup {
 public:
  // Takes all memory. The device is current.
  static Result<std::unique_ptr<BucketLookup>> create(const ServerSetup& setup);

  // Whether a call says what its queries were before RoPE.
  static Status check(const AttendCall& call);
  // The runs of a chunk's blocks. `lookup`: of the call's layer, with the queries of the chunk;
  // scores: workspace [lists, C]. A captured call keeps its positions.
  Status look_up(const AttendCall& call, const BlockChunk& chunk, const PrefillLookup& lookup,
                 float* scores) const;

 private:
  explicit BucketLookup(const ServerSetup& setup);
  size_t lay_out(void* base);

  ServerSetup setup_;
  RopeUndo rope_;
  DeviceMemory frequencies_;  // [d / 2]

  int64_t hidden_ = 0, buckets_ = 0;  // of the layer with most
  int64_t tokens_ = 1;                // of a stretch
  DeviceMemory memory_;
  SplitMatrix queries_, units_;
  float* logits_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace sqz::cuda
