// What the opaque handles of sqz.h are.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "libruntime/session/session.h"
#include "sqz/sqz.h"

struct sqz_index {
  std::shared_ptr<const sqz::SqzFile> file;
  std::string fingerprint;
  std::mutex mutex;                                // guards `served`
  std::shared_ptr<const sqz::ServedIndex> served;  // made with the first session
};

struct sqz_session {
  std::unique_ptr<sqz::Session> session;
};
