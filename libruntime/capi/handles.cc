#include "libruntime/capi/handles.h"

namespace sqz::capi {

Result<std::shared_ptr<const ServedIndex>> serve(sqz_index& index) {
  if (index.served == nullptr) {
    SQZ_ASSIGN_OR_RETURN(index.served, make_served_index(index.file));
  }
  return index.served;
}

Result<ServingSession*> session_here(const sqz_session* session) {
  if (session == nullptr) return Status(Code::kInvalidArgument, "session: found null");
  if (const auto* owner = session->owned.get()) return owner->get();
  return Status(
      Code::kUnsupported,
      concat("session: found one of process ", session->owned.process(), " in its child ", getpid(),
             ", expected one made after fork(): call sqz_session_create() in the child"));
}

}  // namespace sqz::capi
