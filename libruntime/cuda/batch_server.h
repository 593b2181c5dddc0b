// Calls of many requests of one token each: what any of them selected is read once for all, with a
// word for every key that says whose it is; layers that are read whole are read once, too.
#pragma once

#include <memory>
#include <span>

#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/batch_lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// What a session knows when it is created; what it points to lives as long as it does.
struct BatchSetup {
  const ServedIndex* index = nullptr;
  const DeviceIndex* uploaded = nullptr;
  std::span<const LookupParams> lookups;  // of the layers, with the workspace for max_requests
  bool selects = false;                   // clusters are looked up; else layers are read whole
  int64_t max_requests = 0;               // of a launch
  Device device;
};

class BatchServer {
 public:
  // Takes all memory. The device is current and has wgmma.
  static Result<std::unique_ptr<BatchServer>> create(const BatchSetup& setup);

  // Whether a call of one token a request is one for this server: it has several requests, of the
  // index's element type, for keys and values that are on the GPU.
  bool serves(const AttendCall& call, bool selects) const;

  // `lookup`: with the call's queries; null where the layer is read whole. counters [3]: see
  // PrefillLookup.
  Status attend(const AttendCall& call, const LookupParams* lookup, unsigned long long* counters);

 private:
  explicit BatchServer(const BatchSetup& setup);
  size_t lay_out(void* base);
  // How `requests` of them are cut into lists.
  QueryBlocks blocks_of(int64_t requests, bool selects) const;
  // Keys of all lists of those blocks; with more it is faster to read everything.
  uint64_t most_keys(const QueryBlocks& blocks, int64_t slots) const;

  BatchSetup setup_;
  PrefillShape shape_;
  int64_t wave_ = 1;  // requests of a launch
  DeviceMemory memory_;
  BatchLookup lookup_;
  BatchHistory* histories_ = nullptr;  // [layers, kHistories]; null: the rule kBudget
  std::byte* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

}  // namespace sqz::cuda
