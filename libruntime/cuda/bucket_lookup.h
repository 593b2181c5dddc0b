// Lookups of the selector saap: the queries before RoPE of a call, or its queries and positions, go
// through the networks of a layer; of one token a request (kernels/cuda/decode/classify), or of
// blocks of several, stretch by stretch of the call (kernels/cuda/prefill/classify).
#pragma once

#include <memory>

#include "libruntime/cuda/block_chunks.h"
#include "libruntime/cuda/server_setup.h"
#include "libruntime/kernels/cuda/decode/classify/kernel.h"
#include "libruntime/kernels/cuda/prefill/classify/kernel.h"
#include "libruntime/rope.h"

namespace sqz::cuda {

class BucketLookup {
 public:
  // Takes all memory; `blocks`: look_up_blocks() will be called. The device is current.
  // kUnsupported: see plan_classify().
  static Result<std::unique_ptr<BucketLookup>> create(const ServerSetup& setup, bool blocks);

  // Whether a call says what its queries were before RoPE.
  static Status check(const AttendCall& call);
  // Whether look_up() can serve: otherwise look_up_blocks() does, with blocks of one token.
  bool fits() const { return plan_.fits; }
  // The runs of lookup.requests requests from `first` on, of one token each. `lookup`: of the
  // call's layer, with its queries from `first` on. A captured call keeps its positions.
  Status look_up(const AttendCall& call, int64_t first, const LookupParams& lookup) const;
  // The runs of a chunk's blocks. `lookup`: of the call's layer, with the queries of the chunk. A
  // captured call keeps its positions.
  Status look_up_blocks(const AttendCall& call, const BlockChunk& chunk,
                        const Sm80Lookup& lookup) const;

 private:
  explicit BucketLookup(const ServerSetup& setup);
  Status allocate_blocks();
  size_t lay_out_blocks(void* base);
  const void* before_rope(const AttendCall& call, int64_t first) const;

  ServerSetup setup_;
  RopeUndo rope_;
  DeviceMemory frequencies_;  // [d / 2]
  DeviceMemory scratch_;
  ClassifyPlan plan_;

  // Of blocks.
  int64_t hidden_ = 0, buckets_ = 0;  // of the layer with most
  int64_t tokens_ = 1;                // of a stretch
  DeviceMemory memory_;
  SplitMatrix queries_, units_;
  float* logits_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace sqz::cuda
