// A checked call of sqz_attend(). Borrows what its arguments point to.
#pragma once

#include <span>

#include "libruntime/capi/handles.h"

namespace sqz::capi {

class CheckedCall {
 public:
  // `outputs`: out and lse are checked, too. The caller holds the table's mutex as long as the call
  // lives.
  static Result<CheckedCall> check(SlotTable& table, const sqz_attend_args* args, bool outputs);

  // The state of every request.
  Status attend() const;
  // The selection of the first block.
  Result<std::span<const HeadSelection>> select() const;

 private:
  // Requests [first, end) with the same context.
  struct Neighbours {
    ServingSession* session = nullptr;  // null: they have none
    sqz_context context = {-1, 0, 0};
    int64_t first = 0, end = 0;
  };

  explicit CheckedCall(SlotTable& table) : table_(table) {}
  Status check_tensors(const sqz_attend_args& args, bool outputs);
  Status check_contexts(const sqz_attend_args& args);
  Status check_device_contexts(const sqz_attend_args& args);
  // `which` of a request's contexts.
  Status check_context(int64_t request, int64_t which) const;
  bool is_in_place(const ServingSession& session, int64_t request, int64_t which) const;
  Status check_tokens(const Neighbours& requests) const;
  sqz_context context_of(int64_t request, int64_t which) const;
  // The requests from `first` on whose context number `which` is the same.
  Neighbours neighbours(int64_t first, int64_t which) const;
  AttendCall part(const Neighbours& requests) const;
  Status attend(const Neighbours& requests, bool merge) const;

  SlotTable& table_;
  const sqz_context* contexts_ = nullptr;  // [requests, each_]; null: slot 0
  int64_t each_ = 1;
  const sqz_context* device_contexts_ = nullptr;  // [tokens, each_] on the device, in their place
  AttendCall call_;                               // of all requests
};

}  // namespace sqz::capi
