#include "libruntime/capi/call.h"

#include <algorithm>

#include "libruntime/attention/attend.h"
#include "libruntime/capi/fence.h"
#include "libruntime/capi/tensor.h"

namespace sqz::capi {
namespace {

constexpr int64_t kMostOffset = int64_t{1} << 40;  // sums with lengths of contexts do not overflow

// The layer whose keys serve `layer`.
Result<int64_t> find_keys(const ModelDescription& model, int64_t layer) {
  if (layer < 0 || layer >= model.layers) {
    return invalid(concat("layer: found ", layer, ", expected 0 to ", model.layers - 1));
  }
  const LayerGeometry geometry = model.layer(layer);
  if (geometry.kind == LayerKind::kShared) return geometry.of;
  if (geometry.has_keys()) return layer;
  return invalid(concat("layer: found ", layer, ", expected one that has keys in the index"));
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

// Tokens at the beginning of a context that a layer stores apart, so that they can be left out.
int64_t skippable(const IndexMetadata& metadata, int64_t layer) {
  return metadata.layers[static_cast<size_t>(layer)].dense ? metadata.tokens : metadata.sink;
}

bool same(const sqz_context& a, const sqz_context& b) {
  return a.slot == b.slot && a.skip == b.skip && a.offset == b.offset;
}

}  // namespace

Result<CheckedCall> CheckedCall::check(SlotTable& table, const sqz_attend_args* in, bool outputs) {
  sqz_attend_args args;
  SQZ_RETURN_IF_ERROR(read_struct(in, "args", args));
  CheckedCall checked(table);
  AttendCall& call = checked.call_;
  SQZ_ASSIGN_OR_RETURN(call.layer, find_keys(table.model(), args.layer));
  const LayerGeometry geometry = table.model().layer(call.layer);
  call.query_heads = geometry.query_heads;
  call.head_dim = geometry.head_dim;
  call.value_dim = geometry.value_dim;
  SQZ_RETURN_IF_ERROR(checked.check_tensors(args, outputs));
  SQZ_RETURN_IF_ERROR(check_indptr(args, call.tokens));
  call.stream = args.stream;
  call.positions = args.positions;
  call.device_positions = args.device_positions;
  call.indptr = args.indptr;
  call.requests = args.requests;
  SQZ_RETURN_IF_ERROR(checked.check_contexts(args));
  return checked;
}

Status CheckedCall::check_contexts(const sqz_attend_args& args) {
  each_ = std::max<int64_t>(args.contexts_each, 1);
  if (args.contexts_each < 0 || each_ > table_.max_contexts()) {
    return invalid(concat("contexts_each: found ", args.contexts_each, ", expected 0 to ",
                          table_.max_contexts(), ", the session's max_contexts"));
  }
  if (args.device_contexts != nullptr) return check_device_contexts(args);
  contexts_ = args.contexts;
  for (int64_t c = 0; c < each_; ++c) {
    for (Neighbours n; n.end < call_.request_count();) {
      SQZ_RETURN_IF_ERROR(check_context(n.end, c));
      n = neighbours(n.end, c);
      if (n.session == nullptr) continue;
      SQZ_RETURN_IF_ERROR(check_tokens(n));
      // Requests with the same context may have others in front of it.
      const bool alone = n.session->index().metadata().after.empty();
      for (int64_t r = n.first + 1; r < n.end && !alone; ++r) {
        SQZ_RETURN_IF_ERROR(check_context(r, c));
      }
    }
  }
  return {};
}

Status CheckedCall::check_device_contexts(const sqz_attend_args& args) {
  if (args.contexts != nullptr || args.indptr != nullptr) {
    return invalid("device_contexts: found with contexts or indptr, expected them alone");
  }
  if (call_.out == nullptr) return invalid("device_contexts: found some, expected null to select");
  if (call_.tokens > table_.device_requests()) {
    return invalid(concat("q: found ", call_.tokens,
                          " tokens with device_contexts, expected at most ",
                          table_.device_requests(), ", the session's device_requests"));
  }
  device_contexts_ = args.device_contexts;
  return {};
}

// Texts are made for errors alone: a call that succeeds allocates nothing.
Status CheckedCall::check_context(int64_t request, int64_t which) const {
  const sqz_context context = context_of(request, which);
  if (context.slot == -1) return {};
  const auto refuse = [&](Code code, const auto&... text) -> Status {
    const std::string entry =
        contexts_ == nullptr ? "contexts" : concat("contexts[", request * each_ + which, "]");
    return {code, concat(entry, text...)};
  };
  const ServingSession* const session = table_.find(context.slot);
  if (session == nullptr) {
    return refuse(Code::kInvalidArgument, ": found slot ", context.slot,
                  ", expected one that has an index");
  }
  const IndexMetadata& metadata = session->index().metadata();
  const int64_t most = skippable(metadata, call_.layer);
  if (context.skip < 0 || context.skip > most) {
    return refuse(Code::kInvalidArgument, ".skip: found ", context.skip, ", expected 0 to ", most,
                  ", the sinks of the index");
  }
  if ((context.skip != 0 || context.offset != 0) && !composes(metadata)) {
    return refuse(Code::kUnsupported,
                  ": found an offset or skipped tokens, expected none: a layer is not full or "
                  "has state, or the index does not describe how the model turns keys");
  }
  if (context.offset != 0 && table_.composition() == nullptr) {
    return refuse(Code::kInvalidArgument, ".offset: found ", context.offset,
                  ", expected 0: the session's max_contexts is 1");
  }
  if (context.offset < -kMostOffset || context.offset > kMostOffset) {
    return refuse(Code::kInvalidArgument, ".offset: found ", context.offset, ", expected ",
                  -kMostOffset, " to ", kMostOffset);
  }
  if (is_in_place(*session, request, which)) return {};
  return refuse(Code::kMismatch, ": found ", session->index().file->path(), " without the ",
                metadata.after.size(),
                " contexts that stood in front when it was made, expected them there, one behind "
                "the other");
}

// Whether the contexts that stood in front of the index when it was made stand there now.
bool CheckedCall::is_in_place(const ServingSession& session, int64_t request, int64_t which) const {
  const std::vector<std::string>& after = session.index().file->metadata().after;
  int64_t begin = context_of(request, which).offset;
  for (int64_t i = std::ssize(after); i-- > 0;) {
    if (--which < 0) return false;
    const sqz_context front = context_of(request, which);
    const ServingSession* const there = front.slot == -1 ? nullptr : table_.find(front.slot);
    if (there == nullptr || there->index().context_id != after[static_cast<size_t>(i)])
      return false;
    begin -= there->index().metadata().tokens;
    if (front.offset != begin) return false;
  }
  return true;
}

Status CheckedCall::check_tensors(const sqz_attend_args& args, bool outputs) {
  const int device = table_.device();
  const int64_t heads = call_.query_heads;
  if (device < 0 && args.stream != nullptr) {
    return invalid("args.stream: found a stream, expected null on the CPU");
  }
  if (device < 0 && args.device_positions != nullptr) {
    return invalid("args.device_positions: found some, expected null on the CPU");
  }
  SQZ_ASSIGN_OR_RETURN(const TensorView q,
                       check_tensor(args.q, "q", {-1, heads, call_.head_dim}, device));
  const int64_t tokens = q.first_dim;
  const auto like_q = [&](const sqz_tensor* tensor, const char* name,
                          int64_t dim) -> Result<TensorView> {
    SQZ_ASSIGN_OR_RETURN(const TensorView view,
                         check_tensor(tensor, name, {tokens, heads, dim}, device));
    if (view.dtype == q.dtype) return view;
    return invalid(concat(name, ": found another dtype, expected that of q"));
  };
  call_.tokens = tokens;
  call_.dtype = q.dtype;
  call_.q = q.data;
  if (args.q_before_rope != nullptr) {
    SQZ_ASSIGN_OR_RETURN(const TensorView before,
                         like_q(args.q_before_rope, "q_before_rope", call_.head_dim));
    call_.q_before_rope = before.data;
  }
  if (!outputs) return {};
  SQZ_ASSIGN_OR_RETURN(const TensorView out, like_q(args.out, "out", call_.value_dim));
  SQZ_ASSIGN_OR_RETURN(const LseView lse, check_lse(args.lse, "lse", tokens, heads, device));
  SQZ_RETURN_IF_ERROR(check_disjoint(q, "q", out, "out"));
  SQZ_RETURN_IF_ERROR(check_disjoint(q, "q", lse.tensor, "lse"));
  SQZ_RETURN_IF_ERROR(check_disjoint(out, "out", lse.tensor, "lse"));
  call_.out = out.data;
  call_.lse = lse.rows;
  return {};
}

Status CheckedCall::check_tokens(const Neighbours& n) const {
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
  return {};
}

sqz_context CheckedCall::context_of(int64_t request, int64_t which) const {
  return contexts_ == nullptr ? sqz_context{0, 0, 0} : contexts_[request * each_ + which];
}

CheckedCall::Neighbours CheckedCall::neighbours(int64_t first, int64_t which) const {
  Neighbours out{nullptr, context_of(first, which), first, first + 1};
  if (out.context.slot != -1) out.session = table_.find(out.context.slot);
  const int64_t requests = call_.request_count();
  while (out.end < requests && same(context_of(out.end, which), out.context)) ++out.end;
  return out;
}

AttendCall CheckedCall::part(const Neighbours& requests) const {
  AttendCall part = call_;
  const int64_t first = call_.request_begin(requests.first);
  const int64_t row = first * call_.query_heads, size = dtype_size(call_.dtype);
  const auto shift = [&](const void* data) -> const std::byte* {
    if (data == nullptr) return nullptr;
    return static_cast<const std::byte*>(data) + row * call_.head_dim * size;
  };
  part.tokens = call_.request_begin(requests.end) - first;
  part.first_token = first;
  part.q = shift(call_.q);
  part.q_before_rope = shift(call_.q_before_rope);
  if (call_.out != nullptr) {
    part.out = static_cast<std::byte*>(call_.out) + row * call_.value_dim * size;
  }
  part.lse = call_.lse.from(row);
  if (call_.positions != nullptr) part.positions = call_.positions + first;
  if (call_.device_positions != nullptr) part.device_positions = call_.device_positions + first;
  if (call_.indptr != nullptr) {
    part.indptr = call_.indptr + requests.first;
    part.requests = requests.end - requests.first;
  }
  part.skip = requests.context.skip;
  part.offset = requests.context.offset;
  return part;
}

// merge: into what earlier contexts left in out and lse.
Status CheckedCall::attend(const Neighbours& requests, bool merge) const {
  const AttendCall call = part(requests);
  if (requests.session == nullptr) {
    if (merge) return {};
    const int64_t dim = call.value_dim, rows = call.tokens * call.query_heads;
    if (table_.device() >= 0) {
      return cuda::clear_states(table_.device(), call.dtype, rows, dim, call.out, call.lse,
                                call.stream);
    }
    fill_rows(call.dtype, rows, dim, call.out, call.lse, 0, kMinusInfinity);
    return {};
  }
  Composition* const composition = table_.composition();
  if (composition == nullptr) return requests.session->attend(call);
  SQZ_ASSIGN_OR_RETURN(AttendCall turned, composition->turned(call));
  if (!merge) return requests.session->attend(turned);
  turned = composition->apart(turned);
  SQZ_RETURN_IF_ERROR(requests.session->attend(turned));
  return composition->merge(call, turned);
}

Status CheckedCall::attend() const {
  if (device_contexts_ != nullptr) {
    return table_.device_contexts()->attend(call_, device_contexts_, each_);
  }
  for (int64_t c = 0; c < each_; ++c) {
    for (Neighbours n; n.end < call_.request_count();) {
      n = neighbours(n.end, c);
      SQZ_RETURN_IF_ERROR(attend(n, c > 0));
    }
  }
  return {};
}

Result<std::span<const HeadSelection>> CheckedCall::select() const {
  const Neighbours n = neighbours(0, 0);
  if (n.session == nullptr) {
    return invalid("contexts[0]: found none, expected the context to select from");
  }
  AttendCall call = part(n);
  if (call.offset != 0) {
    SQZ_ASSIGN_OR_RETURN(call, table_.composition()->turned(call));
  }
  return n.session->select(call);
}

}  // namespace sqz::capi
