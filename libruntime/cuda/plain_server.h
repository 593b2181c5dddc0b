// Calls with several query tokens a request by the plain kernels: on GPUs before compute capability
// 9.0, and where PrefillServer does not serve a call. The lookups of the selectors quest and saap
// are here in any case.
#pragma once

#include <memory>
#include <span>

#include "libruntime/cuda/block_waves.h"
#include "libruntime/cuda/bucket_blocks.h"
#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/plain/kernel.h"
#include "libruntime/select/plan.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// What a session knows when it is created; the pointers live as long as it does.
struct PlainSetup {
  const ServedIndex* index = nullptr;
  const DeviceIndex* uploaded = nullptr;
  const SelectionPlan* plan = nullptr;
  PrefillGroup group = PrefillGroup::kMean;
  // Of the layers, as for decoding: without levels where none is looked up.
  std::span<const LookupParams> lookups;
  bool selects = true;                    // by lookups; false: no layer does
  const BucketBlocks* buckets = nullptr;  // of the selector saap; else null
  bool estimate = false;                  // what is looked up but not chosen
  int64_t block = 0;                      // tokens that share a selection; 0 = all of a request
  int64_t max_tokens = 0;
  Device device;
};

class PlainServer {
 public:
  // Takes all memory. The device is current.
  static Result<std::unique_ptr<PlainServer>> create(const PlainSetup& setup);

  // params: of all tokens of the call; `looks_up`: whether the layer's keys are found by a lookup,
  // else params.lists is known or empty. counters [3]: {selections, keys, centroids}.
  Status attend(const AttendCall& call, const AttendParams& params, bool looks_up,
                unsigned long long* counters);
  // The runs of a wave's blocks, by the selector's lookup: lists of pairs. At most wave_blocks()
  // blocks; they stay until the next call.
  Result<RunLists> look_up(const AttendCall& call, const BlockWave& wave,
                           unsigned long long* counters);
  int64_t wave_blocks() const { return wave_blocks_; }
  // The runs of the first block: lists of pairs, one a KV head. They are there when the stream is
  // done.
  Result<RunLists> select(const AttendCall& call);
  // What that select() left to be estimated, a KV head each. Waits for the GPU.
  Result<std::vector<std::vector<ClusterRun>>> estimated(int64_t layer) const;

 private:
  explicit PlainServer(const PlainSetup& setup);
  Status allocate();
  size_t lay_out(void* base);
  PlainEstimates estimates_of(int64_t layer) const;

  PlainSetup setup_;
  BlockWaves waves_;
  int64_t wave_blocks_ = 1;
  DeviceMemory memory_;
  int2* table_ = nullptr;                    // [wave_blocks_]
  uint32_t* wanted_ = nullptr;               // [scopes, layers, Hkv]
  uint32_t* alive_ = nullptr;                // [pairs, 2, width]
  unsigned long long* uncounted_ = nullptr;  // [3] what select() counts
  RunLists lists_;
  PlainLookup lookup_;  // the workspace of it
  float* partials_ = nullptr;
};

}  // namespace sqz::cuda
