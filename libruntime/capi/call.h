// A checked call of sqz_attend(). Borrows what its arguments point to.
#pragma once

#include <span>

#include "libruntime/capi/handles.h"

namespace sqz::capi {

class CheckedCall {
 public:
  // `outputs`: out and lse are checked, too. `session` may be null with args.sessions.
  static Result<CheckedCall> check(sqz_session* session, const sqz_attend_args* args, bool outputs);

  // The state of every request.
  Status attend() const;
  // The selection of the first block.
  Result<std::span<const HeadSelection>> select() const;

 private:
  // Requests [first, end) of one session; null: they have no context.
  struct Neighbours {
    ServingSession* session = nullptr;
    int64_t first = 0, end = 0;
  };

  Status check_sessions(const sqz_session* session, const sqz_attend_args& args);
  Status check_tensors(const sqz_attend_args& args, bool outputs);
  Status check_tokens() const;
  Neighbours neighbours(int64_t first) const;
  AttendCall part(const Neighbours& requests) const;
  Status clear(const AttendCall& call) const;

  ServingSession* session_ = nullptr;       // the only one, the first of `sessions_`, or null
  sqz_session* const* sessions_ = nullptr;  // [requests] of this process, or null
  int device_ = -1;                         // CUDA device; -1 = the CPU
  int64_t heads_ = 0, dim_ = 0;             // Hq, d
  AttendCall call_;                         // of all requests
};

}  // namespace sqz::capi
