// Lookups of the selector saap for blocks of several tokens: every query through the network of its
// KV head, stretch by stretch of the call (kernels/cuda/block_classify).
#pragma once

#include <memory>

#include "libruntime/cuda/block_waves.h"
#include "libruntime/cuda/bucket_lookup.h"
#include "libruntime/kernels/cuda/block_classify/kernel.h"

namespace sqz::cuda {

class BucketBlocks {
 public:
  // `networks` lives as long as it does; max_tokens: of a call. Takes all memory; the device is
  // current.
  static Result<std::unique_ptr<BucketBlocks>> create(const BucketLookup& networks,
                                                      const ModelDescription& model,
                                                      std::span<const LookupParams> lookups,
                                                      int64_t max_tokens);

  // The runs of a wave's blocks. `lookup`: of the call's layer, with the queries of the wave. A
  // captured call keeps its positions.
  Status look_up(const AttendCall& call, const BlockWave& wave, const PlainLookup& lookup) const;

 private:
  BucketBlocks(const BucketLookup& networks, const ModelDescription& model)
      : networks_(networks), model_(model) {}
  size_t lay_out(void* base);

  const BucketLookup& networks_;
  const ModelDescription& model_;
  int64_t hidden_ = 0, buckets_ = 0;  // of the layer with most
  int64_t tokens_ = 1;                // of a stretch
  DeviceMemory memory_;
  SplitMatrix queries_, units_;
  float* logits_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace sqz::cuda
