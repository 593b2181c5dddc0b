// Calls of many requests of one token each: what any request of a context selected is read once for
// all of them, with a word for every key that says whose it is; layers that are read whole are read
// once, too.
#pragma once

#include <memory>

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/batch/lookup/kernel.h"

namespace sqz::cuda {

class BatchServer {
 public:
  // A server takes memory for these.
  struct Room {
    PrefillShape shape;
    Device device;
    int64_t requests = 1;  // most of a call; a launch may serve fewer
    int64_t width = 0;     // most clusters of a level; 0: nothing is looked up
    int64_t keys = 0;      // most of a list, exact ones too
    bool budget = false;   // the rule is kBudget
    bool coded = false;    // there are rows of 8 bits
    bool own = false;      // requests have layers of their own
  };
  // Takes all memory. The device is current and has wgmma.
  static Result<std::unique_ptr<BatchServer>> create(const Room& room);

  // Queries are of the index's element type. params: of all tokens of the call. `lookup`: of the
  // layer, without levels if it is read whole; of requests with layers of their own as BatchLookup
  // has it. `maps`: of the layer, or null with layers of the requests' own.
  Status attend(const AttendParams& params, const LookupParams& lookup, KeyMaps* maps,
                cudaStream_t stream) const;

 private:
  explicit BatchServer(const Room& room) : room_(room) {}
  size_t lay_out(void* base);
  // How `requests` of them are cut into lists.
  QueryBlocks blocks_of(int64_t requests, bool selects) const;

  Room room_;
  DeviceMemory memory_;
  BatchLookup lookup_;
  int2* table_ = nullptr;     // [requests]
  int32_t* count_ = nullptr;  // of its blocks
  std::byte* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

}  // namespace sqz::cuda
