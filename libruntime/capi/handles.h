// The contents of the opaque handles of sqz.h.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "libruntime/capi/composition.h"
#include "libruntime/cuda/backend.h"
#include "libruntime/session/session.h"
#include "sqz/sqz.h"

namespace sqz::capi {

// An object with threads or with memory of a GPU. They do not exist in a forked child, so there the
// object is neither used nor destroyed.
template <class Owner>
class OfThisProcess {
 public:
  OfThisProcess() = default;
  explicit OfThisProcess(Owner owner) : owner_(std::make_unique<Owner>(std::move(owner))) {}
  OfThisProcess(OfThisProcess&&) noexcept = default;
  OfThisProcess& operator=(OfThisProcess&& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(process_, other.process_);
    return *this;
  }
  ~OfThisProcess() {
    if (process_ != getpid()) (void)owner_.release();
  }

  pid_t process() const { return process_; }
  // Null in another process.
  Owner* get() const { return process_ == getpid() ? owner_.get() : nullptr; }

 private:
  std::unique_ptr<Owner> owner_;
  pid_t process_ = getpid();
};

// KV heads of an index in the memory of a GPU.
struct Uploaded {
  std::shared_ptr<const ServedIndex> heads;
  std::shared_ptr<cuda::DeviceIndex> memory;
};

// Whether a context can have an offset: RoPE is described, it serves every token in all layers, and
// no layer has state, which is that of one place.
inline bool composes(const IndexMetadata& metadata) {
  const ModelDescription& model = metadata.model;
  bool whole = model.rope.kind != RopeDescription::Kind::kOther && metadata.state.empty();
  for (int64_t l = 0; l < model.layers; ++l) {
    const LayerGeometry layer = model.layer(l);
    if (layer.kind == LayerKind::kNone) continue;
    whole &= layer.kind != LayerKind::kState && layer.head_dim == model.head_dim &&
             layer.first_seen(INT32_MAX) == 0;
  }
  return whole;
}

// The indexes that a session serves, one after the other, with the same options.
class SlotTable {
 public:
  static Result<std::unique_ptr<SlotTable>> create(sqz_index& index, const sqz_session_options& in);

  // Null empties the slot.
  Status put(int64_t slot, sqz_index* index);
  // Null: the slot is empty.
  ServingSession* find(int64_t slot) const;
  Status clear_totals();

  // A model like that of all indexes, with the range of KV heads that is served.
  const ModelDescription& model() const { return model_; }
  int64_t max_contexts() const { return max_contexts_; }
  int device() const { return device_; }                           // CUDA device; -1 = the CPU
  Composition* composition() const { return composition_.get(); }  // null: max_contexts is 1
  // Null: calls have no contexts in device memory.
  cuda::ContextTable* device_contexts() const { return device_contexts_.get(); }
  int64_t device_requests() const { return options_.device_requests; }

  std::mutex mutex;  // a call holds it

 private:
  explicit SlotTable(const sqz_session_options& in);
  Result<std::unique_ptr<ServingSession>> make(sqz_index& index);
  Status make_device_contexts(const ServingSession& first);

  sqz_session_options options_;  // its arrays are the two below
  std::vector<double> thresholds_, layer_scales_;
  std::string model_fingerprint_;
  ModelDescription model_;
  int64_t max_contexts_, max_tokens_ = 0, first_head_ = 0;
  int device_ = -1;
  std::shared_ptr<ThreadPool> pool_;  // of all slots; null on a GPU
  std::vector<std::unique_ptr<ServingSession>> slots_;
  std::unique_ptr<Composition> composition_;
  std::unique_ptr<cuda::ContextTable> device_contexts_;
};

}  // namespace sqz::capi

struct sqz_index {
  std::shared_ptr<const sqz::SqzFile> file;
  std::string fingerprint, context_id, after;
  std::mutex mutex;                                // guards the members below
  std::shared_ptr<const sqz::ServedIndex> served;  // made with the first session or upload
  std::map<int32_t, sqz::capi::OfThisProcess<sqz::capi::Uploaded>> uploaded;  // by device
};

struct sqz_session {
  sqz::capi::OfThisProcess<std::unique_ptr<sqz::capi::SlotTable>> owned;
};

namespace sqz::capi {

// Made at the first call. The caller holds the mutex.
inline Result<std::shared_ptr<const ServedIndex>> serve(sqz_index& index) {
  if (index.served == nullptr) {
    SQZ_ASSIGN_OR_RETURN(index.served, make_served_index(index.file));
  }
  return index.served;
}

// kUnsupported in a child of the process that made the session.
inline Result<SlotTable*> session_here(const sqz_session* session) {
  if (session == nullptr) return Status(Code::kInvalidArgument, "session: found null");
  if (const auto* owner = session->owned.get()) return owner->get();
  return Status(
      Code::kUnsupported,
      concat("session: found one of process ", session->owned.process(), " in its child ", getpid(),
             ", expected one made after fork(): call sqz_session_create() in the child"));
}

}  // namespace sqz::capi
