// Calls of many requests of one token each: what any of them selected is read once for all, with a
// mask for every key that says whose it is; layers that are read whole are read once, too.
#pragma once

#include <memory>

#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// What a session knows when it is created; the pointers live as long as it does.
struct UnionSetup {
  const ServedIndex* index = nullptr;
  const DeviceIndex* uploaded = nullptr;
  TogetherPlan together;     // without requests, if only layers that are read whole are served
  int64_t run_capacity = 0;  // of a list: as RunLists
  int64_t max_requests = 0;  // of a call
  Device device;
};

class UnionServer {
 public:
  // Takes all memory. The device is current and has wgmma.
  static Result<std::unique_ptr<UnionServer>> create(const UnionSetup& setup);

  // Whether a call of one token a request is one for this server: it has many requests, of the
  // index's element type, for keys and values that are on the GPU.
  bool serves(const AttendCall& call, bool selects) const;

  // `lookup`: with the call's queries; null where the layer is read whole. counters [3]: see
  // PrefillLookup.
  Status attend(const AttendCall& call, const LookupParams* lookup, unsigned long long* counters);

 private:
  explicit UnionServer(const UnionSetup& setup);
  size_t lay_out(void* base);

  UnionSetup setup_;
  PrefillShape shape_;
  DeviceMemory memory_;
  UnionLists lists_;
  std::byte* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

}  // namespace sqz::cuda
