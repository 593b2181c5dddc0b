// Lookups of the selector saap: the queries before RoPE of a call, or its queries and positions, go
// through the networks of a layer (kernels/cuda/decode_classify).
#pragma once

#include <memory>
#include <span>

#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "libruntime/kernels/cuda/decode_classify/kernel.h"
#include "libruntime/rope.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

class BucketLookup {
 public:
  // `index` and `uploaded` live as long as it does; lookups: of the layers, those without levels do
  // not select. Takes all memory; the device is current. kUnsupported: see plan_classify().
  static Result<std::unique_ptr<BucketLookup>> create(const ServedIndex& index,
                                                      const DeviceIndex& uploaded,
                                                      std::span<const LookupParams> lookups);

  // Whether a call says what its queries were before RoPE.
  static Status check(const AttendCall& call);
  // Whether look_up() can serve: otherwise BucketBlocks does, with blocks of one token.
  bool fits() const { return plan_.fits; }
  // The runs of lookup.requests requests from `first` on, of one token each. `lookup`: of the
  // call's layer, with its queries from `first` on. A captured call keeps its positions.
  Status look_up(const AttendCall& call, int64_t first, const LookupParams& lookup) const;

  // A layer's network; queries are taken to be before RoPE.
  ClassifyParams params_of(int64_t layer, const LookupParams& lookup) const;
  const float* frequencies() const { return static_cast<const float*>(frequencies_.data()); }
  float shrink() const { return rope_.shrink(); }

 private:
  BucketLookup(const ServedIndex& index, const DeviceIndex& uploaded);

  const ServedIndex& index_;
  const DeviceIndex& uploaded_;
  RopeUndo rope_;
  DeviceMemory frequencies_;  // [d / 2]
  DeviceMemory scratch_;
  ClassifyPlan plan_;
};

}  // namespace sqz::cuda
