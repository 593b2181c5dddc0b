// Calls of many requests of one token each: what any of them selected is read once for all, with a
// word for every key that says whose it is; layers that are read whole are read once, too.
#pragma once

#include <memory>

#include "libruntime/cuda/server_setup.h"
#include "libruntime/kernels/cuda/batch/lookup/kernel.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

class BatchServer {
 public:
  // lookup_requests: those that setup.lookups have the workspace for, which the rule kBudget needs.
  // Takes all memory. The device is current and has wgmma.
  static Result<std::unique_ptr<BatchServer>> create(const ServerSetup& setup,
                                                     int64_t lookup_requests);

  // Whether this server takes a call of one token a request: it has several requests, and its
  // queries are of the index's element type.
  bool serves(const AttendCall& call, bool selects) const;

  // params: of all tokens of the call; `selects`: what they read is looked up, else the layer is
  // read whole.
  Status attend(const AttendCall& call, const AttendParams& params, bool selects);

 private:
  explicit BatchServer(const ServerSetup& setup);
  size_t lay_out(void* base);
  // How `requests` of them are cut into lists.
  QueryBlocks blocks_of(int64_t requests, bool selects) const;

  ServerSetup setup_;
  PrefillShape shape_;
  bool selects_;      // calls that select are served, too
  int64_t most_ = 1;  // requests of a launch
  DeviceMemory memory_;
  BatchLookup lookup_;
  std::byte* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

}  // namespace sqz::cuda
