#include "libruntime/capi/call.h"

#include <algorithm>

#include "libruntime/attention/attend.h"
#include "libruntime/capi/fence.h"
#include "libruntime/capi/tensor.h"

namespace sqz::capi {
namespace {

Status check_layer(int64_t layer, int64_t layers) {
  if (layer >= 0 && layer < layers) return {};
  return invalid(concat("layer: found ", layer, ", expected 0 to ", layers - 1));
}

Status check_indptr(const sqz_attend_args& args, int64_t tokens) {
  if (args.indptr == nullptr) {
    if (args.requests >= 0 && args.requests <= 1) return {};
    return invalid(concat("indptr: found null, expected ", args.requests, " + 1 offsets"));
  }
  if (args.requests < 1) {
    return invalid(concat("requests: found ", args.requests, ", expected at least 1 with indptr"));
  }
  if (args.indptr[0] != 0) {
    return invalid(concat("indptr[0]: found ", args.indptr[0], ", expected 0"));
  }
  for (int64_t i = 1; i <= args.requests; ++i) {
    if (args.indptr[i] < args.indptr[i - 1] || args.indptr[i] > tokens) {
      return invalid(concat("indptr[", i, "]: found ", args.indptr[i], ", expected ",
                            args.indptr[i - 1], " to ", tokens));
    }
  }
  if (args.indptr[args.requests] != tokens) {
    return invalid(concat("indptr[", args.requests, "]: found ", args.indptr[args.requests],
                          ", expected ", tokens, ", the tokens of q"));
  }
  return {};
}

const ModelDescription& model_of(const ServingSession& session) {
  return session.index().metadata().model;
}

}  // namespace

Result<CheckedCall> CheckedCall::check(sqz_session* session, const sqz_attend_args* in,
                                       bool outputs) {
  sqz_attend_args args;
  SQZ_RETURN_IF_ERROR(read_struct(in, "args", args));
  CheckedCall checked;
  SQZ_RETURN_IF_ERROR(checked.check_sessions(session, args));
  SQZ_RETURN_IF_ERROR(checked.check_tensors(args, outputs));
  AttendCall& call = checked.call_;
  SQZ_RETURN_IF_ERROR(check_indptr(args, call.tokens));
  call.layer = args.layer;
  call.stream = args.stream;
  call.positions = args.positions;
  call.indptr = args.indptr;
  call.requests = args.requests;
  SQZ_RETURN_IF_ERROR(checked.check_tokens());
  if (checked.session_ == nullptr) return checked;
  SQZ_RETURN_IF_ERROR(check_layer(call.layer, model_of(*checked.session_).layers));
  return checked;
}

// Sessions of one call are of one model, device and range of KV heads.
Status CheckedCall::check_sessions(const sqz_session* session, const sqz_attend_args& args) {
  if (args.sessions == nullptr) {
    SQZ_ASSIGN_OR_RETURN(session_, session_here(session));
    return {};
  }
  sessions_ = args.sessions;
  const sqz_session* first = nullptr;
  for (int64_t r = 0; r < std::max<int64_t>(args.requests, 1); ++r) {
    const sqz_session* one = sessions_[r];
    if (one == nullptr) continue;
    SQZ_ASSIGN_OR_RETURN(ServingSession* const here, session_here(one));
    if (first == nullptr) {
      first = one;
      session_ = here;
      continue;
    }
    const auto refuse = [&](Code code, const char* what) -> Status {
      return {code, concat("sessions[", r, "]: found a session of another ", what,
                           ", expected that of the sessions before it")};
    };
    if (one->model_fingerprint != first->model_fingerprint) {
      return refuse(Code::kMismatch, "model");
    }
    if (here->device() != session_->device()) return refuse(Code::kInvalidArgument, "device");
    if (here->index().first_head != session_->index().first_head ||
        model_of(*here).kv_heads != model_of(*session_).kv_heads) {
      return refuse(Code::kInvalidArgument, "range of KV heads");
    }
  }
  return {};
}

Status CheckedCall::check_tensors(const sqz_attend_args& args, bool outputs) {
  heads_ = dim_ = -1;
  if (session_ != nullptr) {
    device_ = session_->device();
    heads_ = model_of(*session_).query_heads;
    dim_ = model_of(*session_).head_dim;
  } else if (args.q != nullptr && args.q->device_type == kCuda) {
    device_ = args.q->device_id;
  }
  if (device_ < 0 && args.stream != nullptr) {
    return invalid("args.stream: found a stream, expected null on the CPU");
  }
  SQZ_ASSIGN_OR_RETURN(const TensorView q, check_tensor(args.q, "q", {-1, heads_, dim_}, device_));
  heads_ = args.q->shape[1];
  dim_ = args.q->shape[2];
  const int64_t tokens = q.first_dim;
  const auto like_q = [&](const sqz_tensor* tensor, const char* name) -> Result<TensorView> {
    SQZ_ASSIGN_OR_RETURN(const TensorView view,
                         check_tensor(tensor, name, {tokens, heads_, dim_}, device_));
    if (view.dtype == q.dtype) return view;
    return invalid(concat(name, ": found another dtype, expected that of q"));
  };
  call_.tokens = tokens;
  call_.dtype = q.dtype;
  call_.q = q.data;
  if (args.q_before_rope != nullptr) {
    SQZ_ASSIGN_OR_RETURN(const TensorView before, like_q(args.q_before_rope, "q_before_rope"));
    call_.q_before_rope = before.data;
  }
  if (!outputs) return {};
  SQZ_ASSIGN_OR_RETURN(const TensorView out, like_q(args.out, "out"));
  SQZ_ASSIGN_OR_RETURN(const LseView lse, check_lse(args.lse, "lse", tokens, heads_, device_));
  SQZ_RETURN_IF_ERROR(check_disjoint(q, "q", out, "out"));
  SQZ_RETURN_IF_ERROR(check_disjoint(q, "q", lse.tensor, "lse"));
  SQZ_RETURN_IF_ERROR(check_disjoint(out, "out", lse.tensor, "lse"));
  call_.out = out.data;
  call_.lse = lse.rows;
  return {};
}

Status CheckedCall::check_tokens() const {
  for (Neighbours n; n.end < call_.request_count();) {
    n = neighbours(n.end);
    if (n.session == nullptr) continue;
    const int64_t tokens = call_.request_begin(n.end) - call_.request_begin(n.first);
    if (tokens > n.session->max_tokens()) {
      return invalid(concat("q: found ", tokens, " tokens, expected at most ",
                            n.session->max_tokens(), ", the session's max_tokens"));
    }
    for (int64_t r = n.first; r < n.end; ++r) {
      if (call_.request_tokens(r) <= n.session->max_request_tokens()) continue;
      return invalid(concat("q: found ", call_.request_tokens(r), " tokens of request ", r,
                            ", expected at most ", n.session->max_request_tokens(),
                            ", the session's max_request_tokens"));
    }
  }
  return {};
}

CheckedCall::Neighbours CheckedCall::neighbours(int64_t first) const {
  const int64_t requests = call_.request_count();
  if (sessions_ == nullptr) return {session_, 0, requests};
  sqz_session* const one = sessions_[first];
  Neighbours same{one == nullptr ? nullptr : one->owned.get()->get(), first, first + 1};
  while (same.end < requests && sessions_[same.end] == one) ++same.end;
  return same;
}

AttendCall CheckedCall::part(const Neighbours& requests) const {
  AttendCall part = call_;
  const int64_t first = call_.request_begin(requests.first);
  const int64_t row = first * heads_, bytes = row * dim_ * dtype_size(call_.dtype);
  const auto shift = [&](const void* data) -> const std::byte* {
    return data == nullptr ? nullptr : static_cast<const std::byte*>(data) + bytes;
  };
  part.tokens = call_.request_begin(requests.end) - first;
  part.q = shift(call_.q);
  part.q_before_rope = shift(call_.q_before_rope);
  part.out = call_.out == nullptr ? nullptr : static_cast<std::byte*>(call_.out) + bytes;
  part.lse = call_.lse.from(row);
  if (call_.positions != nullptr) part.positions = call_.positions + first;
  if (call_.indptr != nullptr) {
    part.indptr = call_.indptr + requests.first;
    part.requests = requests.end - requests.first;
  }
  return part;
}

// Requests without a context.
Status CheckedCall::clear(const AttendCall& call) const {
  const int64_t rows = call.tokens * heads_;
  if (device_ >= 0) {
    return cuda::clear_states(device_, call.dtype, rows, dim_, call.out, call.lse, call.stream);
  }
  fill_rows(call.dtype, rows, dim_, call.out, call.lse, 0, kMinusInfinity);
  return {};
}

Status CheckedCall::attend() const {
  for (Neighbours n; n.end < call_.request_count();) {
    n = neighbours(n.end);
    const AttendCall call = part(n);
    if (n.session == nullptr) {
      SQZ_RETURN_IF_ERROR(clear(call));
      continue;
    }
    SQZ_RETURN_IF_ERROR(n.session->attend(call));
  }
  return {};
}

Result<std::span<const HeadSelection>> CheckedCall::select() const {
  const Neighbours n = neighbours(0);
  if (n.session == nullptr) {
    return invalid("sessions[0]: found null, expected the session that selects");
  }
  return n.session->select(part(n));
}

}  // namespace sqz::capi
