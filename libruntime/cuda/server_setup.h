// A session hands this to the servers that it consists of when it is created.
#pragma once

#include <span>
#include <vector>

#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/decode/lookup/kernel.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"
#include "libruntime/select/plan.h"
#include "libruntime/select/selector.h"

namespace sqz::cuda {

class BucketLookup;

inline constexpr int kScopes = Calibration::kScopes;

// The pointers live as long as the session.
struct ServerSetup {
  const ServedIndex* index = nullptr;
  const DeviceIndex* uploaded = nullptr;
  const SelectionPlan* plan = nullptr;
  // The layers, as for decoding: without levels where nothing is looked up. Behind the layers'
  // `wanted` of single tokens are those of the other scopes.
  std::span<const LookupParams> lookups;
  bool clusters = false;                  // are looked up: the selector squeezed selects
  bool blocks_look_up = false;            // blocks of tokens do, of clusters, pages or buckets
  const BucketLookup* buckets = nullptr;  // of the selector saap; else null
  KeyMaps* key_maps = nullptr;            // [layers]
  int64_t block = 0;                      // tokens that share a selection; 0 = all of a request
  int64_t max_tokens = 0;                 // of a call
  int64_t max_request_tokens = 0;         // of one of its requests
  Device device;

  const ModelDescription& model() const { return index->metadata().model; }
};

}  // namespace sqz::cuda
