#include "tools/common/index_context.h"

#include <algorithm>
#include <numeric>

namespace sqz {
namespace {

constexpr int32_t kCpu = 1, kCuda = 2;              // as sqz_tensor::device_type counts
constexpr uint8_t kFloatCode = 2, kBfloatCode = 4;  // as sqz_tensor::dtype_code counts

// The status of calls that throw. The two enums share their values: sqz.h says so of sqz_status,
// status.h of Code.
template <class Body>
Status caught(Body&& body) {
  try {
    body();
    return {};
  } catch (const runtime::Error& error) {
    return {static_cast<Code>(error.status()), error.what()};
  }
}

}  // namespace

Result<std::shared_ptr<OpenIndex>> OpenIndex::open(const std::string& path) {
  std::shared_ptr<OpenIndex> out;
  SQZ_RETURN_IF_ERROR(caught([&] { out.reset(new OpenIndex(path)); }));
  return out;
}

Status OpenIndex::upload(int gpu) {
  gpu_ = gpu;
  return caught([&] { index_.upload(gpu); });
}

Result<std::unique_ptr<IndexContext>> IndexContext::create(std::shared_ptr<const OpenIndex> index,
                                                           sqz_session_options options) {
  std::unique_ptr<IndexContext> out(new IndexContext(std::move(index)));
  options.device_type = out->device() ? kCuda : kCpu;
  options.device_id = out->device().value_or(0);
  SQZ_RETURN_IF_ERROR(caught([&] { out->session_.emplace(out->index_->index(), options); }));
  return out;
}

Result<std::unique_ptr<IndexContext>> IndexContext::open(const std::string& path,
                                                         const sqz_session_options& options) {
  SQZ_ASSIGN_OR_RETURN(auto index, OpenIndex::open(path));
  return create(std::move(index), options);
}

Status IndexContext::append(const std::shared_ptr<const OpenIndex>& index, int64_t offset) {
  constexpr int64_t kSinks = 4;  // the first index's serve all
  const auto slot = static_cast<int32_t>(documents_.size());
  const auto skip = static_cast<int32_t>(std::min(index->info().sink, kSinks));
  documents_.push_back({slot, skip, offset});
  return caught([&] { session_->put(slot, index->index()); });
}

DType IndexContext::device_dtype() const {
  return info().dtype_code == kBfloatCode ? DType::kBF16 : DType::kF16;
}

Status IndexContext::attend(int64_t layer, const ContextQueries& queries) {
  const int64_t count = queries.indptr.back();
  positions_.resize(static_cast<size_t>(count));
  for (size_t r = 0; r < queries.first.size(); ++r) {
    std::iota(positions_.begin() + queries.indptr[r], positions_.begin() + queries.indptr[r + 1],
              queries.first[r]);
  }
  int64_t shape[] = {count, queries.heads, queries.dim};
  const auto tensor = [&](DType dtype, const void* data, int32_t dimensions) {
    sqz_tensor out = {};
    out.data = const_cast<void*>(data);
    out.device_type = device() ? kCuda : kCpu;
    out.device_id = device().value_or(0);
    out.ndim = dimensions;
    out.dtype_code = dtype == DType::kBF16 ? kBfloatCode : kFloatCode;
    out.dtype_bits = dtype == DType::kF32 ? 32 : 16;
    out.dtype_lanes = 1;
    out.shape = shape;
    return out;
  };
  const sqz_tensor q = tensor(queries.dtype, queries.q, 3);
  sqz_tensor out = tensor(queries.dtype, queries.out, 3);
  sqz_tensor lse = tensor(DType::kF32, queries.lse, 2);
  auto args = runtime::make<sqz_attend_args>();
  args.layer = layer;
  args.q = &q;
  args.out = &out;
  args.lse = &lse;
  args.positions = positions_.data();
  args.indptr = queries.indptr.data();
  args.requests = std::ssize(queries.first);
  contexts_.clear();
  for (int64_t r = 0; r < args.requests; ++r) {
    contexts_.insert(contexts_.end(), documents_.begin(), documents_.end());
  }
  args.contexts = contexts_.data();
  args.contexts_each = std::ssize(documents_);
  return caught([&] { session_->attend(args); });
}

Result<sqz_stats> IndexContext::stats(int64_t layer) const {
  sqz_stats out = {};
  SQZ_RETURN_IF_ERROR(caught([&] {
    out = session_->stats(layer);
    for (size_t slot = 1; slot < documents_.size(); ++slot) {
      const sqz_stats more = session_->stats(layer, static_cast<int64_t>(slot));
      out.keys_read += more.keys_read;
      out.keys_possible += more.keys_possible;
      out.bytes_read += more.bytes_read;
      out.bytes_dense += more.bytes_dense;
    }
  }));
  return out;
}

Status IndexContext::reset_stats() {
  return caught([&] { session_->reset_stats(); });
}

}  // namespace sqz
