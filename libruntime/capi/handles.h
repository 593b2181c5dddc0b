// What the opaque handles of sqz.h are.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "libruntime/cuda/backend.h"
#include "libruntime/session/session.h"
#include "sqz/sqz.h"

struct sqz_index {
  std::shared_ptr<const sqz::SqzFile> file;
  std::string fingerprint;
  std::mutex mutex;                                // guards what follows
  std::shared_ptr<const sqz::ServedIndex> served;  // made with the first session or upload
  std::map<int32_t, std::shared_ptr<sqz::cuda::DeviceIndex>> uploaded;  // by device
};

namespace sqz::capi {

// Made at the first call. The caller holds the mutex.
Result<std::shared_ptr<const ServedIndex>> serve(sqz_index& index);

}  // namespace sqz::capi

struct sqz_session {
  std::unique_ptr<sqz::ServingSession> session;
};
