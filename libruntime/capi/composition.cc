#include "libruntime/capi/composition.h"

#include "libruntime/attention/attend.h"
#include "libruntime/cuda/backend.h"
#include "libruntime/session/thread_pool.h"

namespace sqz::capi {

Composition::Composition(const ModelDescription& model, int device,
                         std::shared_ptr<ThreadPool> pool)
    : device_(device),
      pool_(std::move(pool)),
      shift_(RopeUndo::shift(model.rope, model.head_dim)) {}

Result<std::unique_ptr<Composition>> Composition::create(const ModelDescription& model,
                                                         int64_t max_tokens, int device,
                                                         std::shared_ptr<ThreadPool> pool) {
  std::unique_ptr<Composition> out(new Composition(model, device, std::move(pool)));
  const int64_t heads = model.most([](const LayerGeometry& layer) { return layer.query_heads; });
  const int64_t dim = model.most([](const LayerGeometry& layer) { return layer.widest(); });
  const int64_t width = heads * dim, lse = max_tokens * heads, numbers = max_tokens * width;
  const auto bytes = static_cast<size_t>(4 * (2 * numbers + lse));
  if (device >= 0) {
    SQZ_ASSIGN_OR_RETURN(out->memory_, cuda::device_memory(device, bytes));
  } else {
    // Not touched until used, so that memory that a short call does not need costs nothing.
    out->memory_.reset(new float[bytes / 4], [](float* memory) { delete[] memory; });
    out->rows_.reset(new float[out->pool_->size() * (width + dim)]);
  }
  out->q_ = static_cast<std::byte*>(out->memory_.get());
  out->out_ = out->q_ + 4 * numbers;
  out->lse_ = reinterpret_cast<float*>(out->out_ + 4 * numbers);
  return out;
}

Result<AttendCall> Composition::turned(const AttendCall& call) {
  AttendCall out = call;
  if (call.offset == 0 || shift_.frequencies().empty()) return out;
  out.q = q_;
  const int64_t heads = call.query_heads, dim = call.head_dim, width = heads * dim;
  if (device_ >= 0) {
    SQZ_RETURN_IF_ERROR(cuda::turn_rows(device_, shift_, call.offset, call.dtype,
                                        call.tokens * heads, dim, call.q, q_, call.stream));
    return out;
  }
  pool_->for_each(call.tokens, [&](int64_t token, int thread) {
    const int64_t at = token * width * dtype_size(call.dtype);
    float* const rows = rows_.get() + thread * (width + dim);
    (void)to_finite_floats(call.dtype, static_cast<const std::byte*>(call.q) + at, width, rows);
    shift_.apply(call.offset, rows, heads, rows + width, rows);
    store_floats(call.dtype, rows, width, q_ + at);
  });
  return out;
}

AttendCall Composition::apart(const AttendCall& call) const {
  AttendCall out = call;
  out.out = out_;
  out.lse = lse_;
  return out;
}

Status Composition::merge(const AttendCall& call, const AttendCall& apart) const {
  const int64_t rows = call.tokens * call.query_heads;
  if (device_ >= 0) {
    return cuda::merge_states(device_, call.dtype, rows, call.value_dim, call.out, call.lse,
                              apart.out, apart.lse, {}, call.stream);
  }
  merge_rows(call.dtype, rows, call.value_dim, call.out, call.lse, apart.out, apart.lse);
  return {};
}

}  // namespace sqz::capi
