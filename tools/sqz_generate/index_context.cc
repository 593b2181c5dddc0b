#include "tools/sqz_generate/index_context.h"

#include <cstring>
#include <numeric>

#include "tools/common/signals.h"

namespace sqz {
namespace {

constexpr int32_t kCpu = 1, kCuda = 2;  // as sqz_tensor::device_type counts

sqz_tensor tensor_of(DType dtype, const void* data, int64_t* shape, int32_t ndim,
                     int32_t device_type, int32_t device_id) {
  sqz_tensor out = {};
  out.data = const_cast<void*>(data);
  out.device_type = device_type;
  out.device_id = device_id;
  out.ndim = ndim;
  out.dtype_code = dtype == DType::kBF16 ? 4 : 2;
  out.dtype_bits = dtype == DType::kF32 ? 32 : 16;
  out.dtype_lanes = 1;
  out.shape = shape;
  return out;
}

// Float32 as 16 bits and back; `bytes` has room.
void round_floats(DType dtype, const float* from, size_t count, std::byte* bytes) {
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits =
        dtype == DType::kBF16 ? to_bfloat16(from[i]).bits : to_float16(from[i]).bits;
    std::memcpy(bytes + 2 * i, &bits, 2);
  }
}

void widen(DType dtype, const std::byte* bytes, size_t count, float* to) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes + 2 * i, 2);
    to[i] = dtype == DType::kBF16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
  }
}

// kCancelled once the answer is interrupted or the tool stopped.
Status check_ended() {
  return interrupted() ? Status(Code::kCancelled, "interrupted") : check_stop();
}

}  // namespace

Result<std::unique_ptr<IndexContext>> IndexContext::create(std::shared_ptr<const OpenIndex> index,
                                                           sqz_session_options options) {
  std::unique_ptr<IndexContext> out(new IndexContext(std::move(index)));
  const std::optional<int> gpu = out->index_->gpu();
  if (gpu) {
    options.device_type = kCuda;
    options.device_id = *gpu;
    SQZ_ASSIGN_OR_RETURN(out->staging_, DeviceStaging::create(*gpu));
  }
  SQZ_RETURN_IF_ERROR(to_status(sqz_session_create(out->index_->get(), &options, &out->session_)));
  return out;
}

Result<std::unique_ptr<IndexContext>> IndexContext::open(const std::string& path,
                                                         const sqz_session_options& options) {
  SQZ_ASSIGN_OR_RETURN(auto index, OpenIndex::open(path));
  return create(std::move(index), options);
}

IndexContext::~IndexContext() {
  sqz_session_destroy(session_);
}

Status IndexContext::attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                            float* lse) {
  const int64_t indptr[] = {0, count};
  return attend_requests(layer, {.q = q,
                                 .out = out,
                                 .lse = lse,
                                 .heads = info().query_heads,
                                 .dim = info().head_dim,
                                 .indptr = indptr,
                                 .first = {&first, 1}});
}

Status IndexContext::attend_requests(int64_t layer, const HostQueries& queries) {
  SQZ_RETURN_IF_ERROR(check_ended());
  const int64_t count = queries.indptr.back();
  positions_.resize(static_cast<size_t>(count));
  for (size_t r = 0; r < queries.first.size(); ++r) {
    std::iota(positions_.begin() + queries.indptr[r], positions_.begin() + queries.indptr[r + 1],
              queries.first[r]);
  }
  sqz_attend_args args = {};
  args.struct_size = sizeof(args);
  args.layer = layer;
  args.positions = positions_.data();
  args.indptr = queries.indptr.data();
  args.requests = std::ssize(queries.first);
  if (staging_ != nullptr) return attend_staged(args, queries);
  int64_t shape[] = {count, queries.heads, queries.dim};
  const sqz_tensor q = tensor_of(DType::kF32, queries.q, shape, 3, kCpu, 0);
  sqz_tensor out = tensor_of(DType::kF32, queries.out, shape, 3, kCpu, 0);
  sqz_tensor lse = tensor_of(DType::kF32, queries.lse, shape, 2, kCpu, 0);
  args.q = &q;
  args.out = &out;
  args.lse = &lse;
  return to_status(sqz_attend(session_, &args));
}

Status IndexContext::attend_staged(sqz_attend_args& args, const HostQueries& queries) {
  const int device = index_->gpu().value_or(0);
  const int64_t count = queries.indptr.back();
  const auto rows = static_cast<size_t>(count * queries.heads);
  const size_t floats = rows * static_cast<size_t>(queries.dim);
  const DType dtype = count == 1 ? DType::kF32 : index_->dtype();
  const bool narrow = dtype != DType::kF32;
  rounded_.resize(narrow ? 2 * floats : 0);
  if (narrow) round_floats(dtype, queries.q, floats, rounded_.data());
  const void* from = narrow ? static_cast<const void*>(rounded_.data()) : queries.q;
  SQZ_RETURN_IF_ERROR(staging_->load(from, floats * (narrow ? 2 : 4), rows));
  int64_t shape[] = {count, queries.heads, queries.dim};
  const sqz_tensor q = tensor_of(dtype, staging_->q, shape, 3, kCuda, device);
  sqz_tensor out = tensor_of(dtype, staging_->out, shape, 3, kCuda, device);
  sqz_tensor lse = tensor_of(DType::kF32, staging_->lse, shape, 2, kCuda, device);
  args.q = &q;
  args.out = &out;
  args.lse = &lse;
  SQZ_RETURN_IF_ERROR(to_status(sqz_attend(session_, &args)));
  void* to = narrow ? static_cast<void*>(rounded_.data()) : queries.out;
  SQZ_RETURN_IF_ERROR(staging_->store(to, queries.lse));
  if (narrow) widen(dtype, rounded_.data(), floats, queries.out);
  return {};
}

Status IndexContext::attend_on_device(int64_t layer, const DeviceQueries& queries) {
  SQZ_RETURN_IF_ERROR(check_ended());
  const int device = index_->gpu().value_or(0);
  int64_t shape[] = {queries.indptr.back(), info().query_heads, info().head_dim};
  const sqz_tensor q = tensor_of(queries.dtype, queries.q, shape, 3, kCuda, device);
  const sqz_tensor before = tensor_of(queries.dtype, queries.before_rope, shape, 3, kCuda, device);
  sqz_tensor out = tensor_of(queries.dtype, queries.out, shape, 3, kCuda, device);
  sqz_tensor lse = tensor_of(DType::kF32, queries.lse, shape, 2, kCuda, device);
  sqz_attend_args args = {};
  args.struct_size = sizeof(args);
  args.layer = layer;
  args.q = &q;
  args.q_before_rope = &before;
  args.out = &out;
  args.lse = &lse;
  args.indptr = queries.indptr.data();
  args.requests = std::ssize(queries.indptr) - 1;
  args.stream = queries.stream;
  return to_status(sqz_attend(session_, &args));
}

Result<sqz_stats> IndexContext::stats(int64_t layer) const {
  sqz_stats out = {};
  out.struct_size = sizeof(out);
  SQZ_RETURN_IF_ERROR(to_status(sqz_session_stats(session_, layer, &out)));
  return out;
}

Status IndexContext::reset_stats() {
  return to_status(sqz_session_reset_stats(session_));
}

}  // namespace sqz
