// sqz_attend(), sqz_select() and sqz_merge_states().
#include <algorithm>

#include "libruntime/attention/attend.h"
#include "libruntime/capi/call.h"
#include "libruntime/capi/fence.h"
#include "libruntime/capi/tensor.h"

namespace {

using sqz::concat;
using sqz::Status;
using sqz::capi::CheckedCall;
using sqz::capi::fence;
using sqz::capi::invalid;
using sqz::capi::kCuda;

}  // namespace

extern "C" {

sqz_status sqz_attend(sqz_session* session, const sqz_attend_args* args) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(sqz::capi::SlotTable* const table, sqz::capi::session_here(session));
    const std::lock_guard lock(table->mutex);
    SQZ_ASSIGN_OR_RETURN(const CheckedCall call, CheckedCall::check(*table, args, true));
    return call.attend();
  });
}

sqz_status sqz_select(sqz_session* session, const sqz_attend_args* args, sqz_run* runs,
                      int64_t capacity, int64_t* indptr, int64_t* count) {
  return fence([&]() -> Status {
    if (indptr == nullptr || count == nullptr) return invalid("indptr or count: found null");
    if (capacity < 0 || (capacity > 0 && runs == nullptr)) {
      return invalid(concat("runs: found null or capacity ", capacity, ", expected room for runs"));
    }
    SQZ_ASSIGN_OR_RETURN(sqz::capi::SlotTable* const table, sqz::capi::session_here(session));
    const std::lock_guard lock(table->mutex);
    SQZ_ASSIGN_OR_RETURN(const CheckedCall call, CheckedCall::check(*table, args, false));
    SQZ_ASSIGN_OR_RETURN(const auto heads, call.select());
    int64_t need = 0;
    for (const sqz::HeadSelection& head : heads) need += head.read.count;
    *count = need;
    if (need > capacity) {
      return invalid(concat("capacity: found ", capacity, ", expected at least ", need));
    }
    indptr[0] = 0;
    for (size_t h = 0; h < heads.size(); ++h) {
      const auto read = heads[h].read.runs();
      indptr[h + 1] = indptr[h] + heads[h].read.count;
      std::transform(read.begin(), read.end(), runs + indptr[h], [](const sqz::KeyRun& run) {
        return sqz_run{run.first, run.length};
      });
    }
    return {};
  });
}

sqz_status sqz_merge_states(sqz_tensor* out_a, sqz_tensor* lse_a, const sqz_tensor* out_b,
                            const sqz_tensor* lse_b) {
  return sqz_merge_states_on(out_a, lse_a, out_b, lse_b, nullptr);
}

sqz_status sqz_merge_states_on(sqz_tensor* out_a, sqz_tensor* lse_a, const sqz_tensor* out_b,
                               const sqz_tensor* lse_b, void* stream) {
  return sqz_merge_states_with(out_a, lse_a, out_b, lse_b, nullptr, stream);
}

sqz_status sqz_merge_states_with(sqz_tensor* out_a, sqz_tensor* lse_a, const sqz_tensor* out_b,
                                 const sqz_tensor* lse_b, const sqz_tensor* sinks, void* stream) {
  return fence([&]() -> Status {
    using sqz::capi::check_tensor, sqz::capi::check_lse;
    const bool cuda = out_a != nullptr && out_a->device_type == kCuda;
    const int device = cuda ? out_a->device_id : -1;
    if (!cuda && stream != nullptr) {
      return invalid("stream: found a stream, expected null on the CPU");
    }
    SQZ_ASSIGN_OR_RETURN(const auto a, check_tensor(out_a, "out_a", {-1, -1, -1}, device));
    const int64_t tokens = out_a->shape[0], heads = out_a->shape[1], dim = out_a->shape[2];
    SQZ_ASSIGN_OR_RETURN(const auto b, check_tensor(out_b, "out_b", {tokens, heads, dim}, device));
    SQZ_ASSIGN_OR_RETURN(const auto la, check_lse(lse_a, "lse_a", tokens, heads, device));
    SQZ_ASSIGN_OR_RETURN(const auto lb, check_lse(lse_b, "lse_b", tokens, heads, device));
    SQZ_RETURN_IF_ERROR(sqz::capi::check_disjoint(a, "out_a", la.tensor, "lse_a"));
    SQZ_RETURN_IF_ERROR(sqz::capi::check_disjoint(a, "out_a", lb.tensor, "lse_b"));
    SQZ_RETURN_IF_ERROR(sqz::capi::check_disjoint(b, "out_b", la.tensor, "lse_a"));
    if (a.dtype != b.dtype) return invalid("out_b: found another dtype, expected that of out_a");
    sqz::Sinks own;
    if (sinks != nullptr) {
      SQZ_ASSIGN_OR_RETURN(const auto s, check_tensor(sinks, "sinks", {heads}, device));
      if (s.dtype != sqz::DType::kF32) return invalid("sinks: found another dtype, expected f32");
      own = {static_cast<const float*>(s.data), std::max<int64_t>(heads, 1)};
    }
    const sqz::ConstLseRows rows_b = lb.rows;
    if (cuda) {
      return sqz::cuda::merge_states(device, a.dtype, tokens * heads, dim, a.data, la.rows, b.data,
                                     rows_b, own, stream);
    }
    sqz::merge_rows(a.dtype, tokens * heads, dim, a.data, la.rows, b.data, rows_b, own);
    return {};
  });
}

}  // extern "C"
