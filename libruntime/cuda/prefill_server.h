// Calls with several query tokens a request, by the prefill kernels: a session's part that cuts
// calls into blocks and waves of them, as the CPU backend does, and holds the memory for it.
#pragma once

#include <memory>
#include <vector>

#include "libruntime/cuda/block_waves.h"
#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/cuda/plain_server.h"
#include "libruntime/cuda/static_lists.h"
#include "libruntime/kernels/cuda/prefill.h"
#include "libruntime/select/plan.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// What a session knows when it is created; the pointers live as long as it does.
struct PrefillSetup {
  const ServedIndex* index = nullptr;
  const DeviceIndex* uploaded = nullptr;
  const SelectionPlan* plan = nullptr;
  PrefillGroup group = PrefillGroup::kMean;
  const StaticLists* known = nullptr;  // what layers read whose selector looks at no query
  int64_t exact_skipped = 0;           // first exact keys that those do not read
  bool selects = true;                 // by lookups of its own; false: no layer does
  PlainServer* finder = nullptr;       // looks up in the place of these; may be null
  int64_t block = 0;                   // tokens that share a selection; 0 = all of a request
  int64_t max_tokens = 0;
  Device device;
};

// Of the layers of an index; what of them is on the GPU.
PrefillShape prefill_shape(const IndexMetadata& metadata);
PrefillKeys prefill_keys(const DeviceLayer& layer);

class PrefillServer {
 public:
  // Takes all memory. The device is current.
  static Result<std::unique_ptr<PrefillServer>> create(const PrefillSetup& setup);

  // Whether a call can be served: of the index's element type, by GPUs of compute capability 9.0,
  // from the index's own keys and values or, where those were not uploaded, from an engine's cache,
  // which is brought into the order of the index first, layer by layer.
  bool serves(const AttendCall& call) const;

  // `selects`: whether the layer does. counters [3]: see PrefillLookup.
  Status attend(const AttendCall& call, bool selects, unsigned long long* counters);
  // The runs of the first block, by lookups of its own: lists of pairs, one a KV head. They are
  // there when the stream is done.
  Result<RunLists> select(const AttendCall& call);

 private:
  explicit PrefillServer(const PrefillSetup& setup);
  Status allocate();
  size_t lay_out(void* base);
  PrefillLevel level_of(int64_t layer, int level) const;
  Status gather(const AttendCall& call);
  Result<RunLists> look_up(const AttendCall& call, const BlockWave& wave,
                           unsigned long long* counters);
  const std::byte* queries_of(const AttendCall& call, int64_t token) const;

  PrefillSetup setup_;
  PrefillShape shape_;
  int64_t wave_blocks_ = 1;
  BlockWaves waves_;

  DeviceMemory memory_;
  int2* table_ = nullptr;       // [wave_blocks_]
  uint32_t* wanted_ = nullptr;  // [scopes, layers, Hkv]; the rule `budget` only
  RunLists lists_[2];           // of the levels in turn
  std::byte *lookup_ = nullptr, *attend_ = nullptr;
  // Of the layer that is served, where they come from a cache.
  std::byte *keys_ = nullptr, *values_ = nullptr;              // [Hkv, M, d]
  std::byte *exact_keys_ = nullptr, *exact_values_ = nullptr;  // [Hkv, E, d]
  int64_t lookup_bytes_ = 0, attend_bytes_ = 0;
};

}  // namespace sqz::cuda
