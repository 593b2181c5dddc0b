#include "tools/sqz_generate/index_context.h"

#include <numeric>

namespace sqz {
namespace {

constexpr int32_t kCpu = 1, kCuda = 2;  // as sqz_tensor::device_type counts

// The two enums share their values: sqz.h says so of sqz_status, status.h of Code.
Status to_status(sqz_status status) {
  return status == SQZ_OK ? Status() : Status(static_cast<Code>(status), sqz_last_error());
}

sqz_tensor float_tensor(const float* data, int64_t* shape, int32_t ndim,
                        const sqz_session_options& device) {
  sqz_tensor out = {};
  out.data = const_cast<float*>(data);
  out.device_type = device.device_type == kCuda ? kCuda : kCpu;
  out.device_id = device.device_id;
  out.ndim = ndim;
  out.dtype_code = 2;
  out.dtype_bits = 32;
  out.dtype_lanes = 1;
  out.shape = shape;
  return out;
}

}  // namespace

Result<std::unique_ptr<IndexContext>> IndexContext::open(const std::string& path,
                                                         const sqz_session_options& options) {
  std::unique_ptr<IndexContext> out(new IndexContext);
  SQZ_RETURN_IF_ERROR(to_status(sqz_index_open(path.c_str(), SQZ_OPEN_MMAP, &out->index_)));
  out->info_.struct_size = sizeof(out->info_);
  SQZ_RETURN_IF_ERROR(to_status(sqz_index_describe(out->index_, &out->info_)));
  out->device_ = options;
  if (options.device_type == kCuda) {
    SQZ_ASSIGN_OR_RETURN(out->staging_, DeviceStaging::create(options.device_id));
    sqz_upload_options upload = {};
    upload.struct_size = sizeof(upload);
    upload.device_id = options.device_id;
    SQZ_RETURN_IF_ERROR(to_status(sqz_index_upload(out->index_, &upload)));
  }
  SQZ_RETURN_IF_ERROR(to_status(sqz_session_create(out->index_, &options, &out->session_)));
  return out;
}

IndexContext::~IndexContext() {
  sqz_session_destroy(session_);
  sqz_index_close(index_);
}

Status IndexContext::attend(int64_t layer, int64_t first, int64_t count, const float* q, float* out,
                            float* lse) {
  int64_t shape[] = {count, info_.query_heads, info_.head_dim};
  const auto rows = static_cast<size_t>(count * info_.query_heads);
  if (staging_ != nullptr) {
    SQZ_RETURN_IF_ERROR(staging_->load(q, rows * static_cast<size_t>(info_.head_dim), rows));
  }
  const bool staged = staging_ != nullptr;
  const sqz_tensor q_tensor = float_tensor(staged ? staging_->q : q, shape, 3, device_);
  sqz_tensor out_tensor = float_tensor(staged ? staging_->out : out, shape, 3, device_);
  sqz_tensor lse_tensor = float_tensor(staged ? staging_->lse : lse, shape, 2, device_);
  positions_.resize(static_cast<size_t>(count));
  std::iota(positions_.begin(), positions_.end(), first);
  sqz_attend_args args = {};
  args.struct_size = sizeof(args);
  args.layer = layer;
  args.q = &q_tensor;
  args.out = &out_tensor;
  args.lse = &lse_tensor;
  args.positions = positions_.data();
  SQZ_RETURN_IF_ERROR(to_status(sqz_attend(session_, &args)));
  return staged ? staging_->store(out, lse) : Status();
}

Result<sqz_stats> IndexContext::stats() const {
  sqz_stats out = {};
  out.struct_size = sizeof(out);
  SQZ_RETURN_IF_ERROR(to_status(sqz_session_stats(session_, -1, &out)));
  return out;
}

Status IndexContext::reset_stats() {
  return to_status(sqz_session_reset_stats(session_));
}

}  // namespace sqz
