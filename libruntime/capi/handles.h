// The contents of the opaque handles of sqz.h.
#pragma once

#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

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

}  // namespace sqz::capi

struct sqz_index {
  std::shared_ptr<const sqz::SqzFile> file;
  std::string fingerprint;
  std::mutex mutex;                                // guards the members below
  std::shared_ptr<const sqz::ServedIndex> served;  // made with the first session or upload
  std::map<int32_t, sqz::capi::OfThisProcess<sqz::capi::Uploaded>> uploaded;  // by device
};

struct sqz_session {
  sqz::capi::OfThisProcess<std::unique_ptr<sqz::ServingSession>> owned;
  std::string model_fingerprint;
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
inline Result<ServingSession*> session_here(const sqz_session* session) {
  if (session == nullptr) return Status(Code::kInvalidArgument, "session: found null");
  if (const auto* owner = session->owned.get()) return owner->get();
  return Status(
      Code::kUnsupported,
      concat("session: found one of process ", session->owned.process(), " in its child ", getpid(),
             ", expected one made after fork(): call sqz_session_create() in the child"));
}

}  // namespace sqz::capi
