// The contexts of a session by their slots, in the memory of a GPU, for calls that name them there:
// a captured call serves whatever its requests name when it is replayed. One token a request.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "libruntime/cuda/batch_server.h"
#include "libruntime/cuda/session.h"
#include "libruntime/kernels/cuda/decode/contexts/kernel.h"

namespace sqz::cuda {

class DeviceContexts final : public ContextTable {
 public:
  static Result<std::unique_ptr<DeviceContexts>> create(const CudaSession& first,
                                                        const ContextTableOptions& options);

  Status put(int64_t slot, const ServingSession* session) override;
  Status attend(const AttendCall& call, const void* contexts, int64_t each) override;

 private:
  DeviceContexts(const CudaSession& first, const ContextTableOptions& options);
  Status allocate();
  Status create_batch();
  Status write_maps(std::vector<ContextLayer>& layers, LayerMaps* to) const;
  size_t lay_out(void* base);
  Status check(const CudaSession& session, const std::vector<ContextLayer>& layers) const;
  const ModelDescription& model() const { return index_->metadata().model; }

  std::shared_ptr<const ServedIndex> index_;  // the first one
  const ContextTableOptions options_;
  const int64_t most_tokens_;  // of a context that is looked up
  const int gpu_id_;
  const bool looks_up_;
  std::vector<bool> coded_;  // [layers] have rows of 8 bits
  Device gpu_;
  TeamSizes team_sizes_;
  int64_t rows_at_once_ = 1;            // of a launch
  std::unique_ptr<BatchServer> batch_;  // null: every row reads its own
  DeviceMemory memory_;
  std::map<int64_t, std::unique_ptr<DeviceMemory>> layers_;  // by slot
  const ContextLayer** slots_ = nullptr;                     // [SQZ_MOST_SLOTS], device
  float* frequencies_ = nullptr;
  ContextRows rows_;
  LookupParams lookup_;
  AttendParams attend_;
  std::byte *row_q_ = nullptr, *row_out_ = nullptr;
  float* row_lse_ = nullptr;
};

}  // namespace sqz::cuda
