#include "tools/common/index_context.h"

#include <algorithm>
#include <numeric>

#include "formats/sqz_file.h"
#include "tools/common/metrics.h"
#include "tools/common/texts.h"

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

Result<std::vector<std::shared_ptr<OpenIndex>>> open_indexes(const std::vector<std::string>& paths,
                                                             const ModelDescription& model,
                                                             const Tokenizer* tokenizer,
                                                             const std::string& model_path) {
  std::vector<std::shared_ptr<OpenIndex>> out;
  for (const std::string& path : paths) {
    SQZ_ASSIGN_OR_RETURN(auto index, OpenIndex::open(path));
    if (fingerprint(model) != index->info().model_fingerprint) {  // the file says in which field
      SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
      SQZ_RETURN_IF_ERROR(check_same_model(file->metadata().model, model, path));
    }
    if (tokenizer != nullptr) {
      SQZ_RETURN_IF_ERROR(
          check_tokenizer(path, index->info().tokenizer_hash, *tokenizer, model_path));
    }
    out.push_back(std::move(index));
  }
  return out;
}

Result<std::unique_ptr<IndexContext>> IndexContext::create(
    const std::vector<std::shared_ptr<OpenIndex>>& indexes, sqz_session_options options) {
  std::unique_ptr<IndexContext> out(new IndexContext(indexes[0]));
  options.device_type = out->device() ? kCuda : kCpu;
  options.device_id = out->device().value_or(0);
  options.max_contexts = std::max(options.max_contexts, static_cast<int32_t>(indexes.size()));
  SQZ_RETURN_IF_ERROR(caught([&] { out->session_.emplace(out->index_->index(), options); }));
  for (size_t i = 1; i < indexes.size(); ++i) {
    SQZ_RETURN_IF_ERROR(out->append(indexes[i], out->tokens_));
    out->tokens_ += indexes[i]->info().tokens;
  }
  return out;
}

Result<std::unique_ptr<IndexContext>> IndexContext::open(const std::string& path,
                                                         const sqz_session_options& options) {
  SQZ_ASSIGN_OR_RETURN(auto index, OpenIndex::open(path));
  return create({std::move(index)}, options);
}

void IndexContext::end_at_zero() {
  for (sqz_context& document : documents_) document.offset -= tokens_;
  tokens_ = 0;
}

Status IndexContext::append(const std::shared_ptr<const OpenIndex>& index, int64_t offset) {
  // The first index's sinks serve all that were not made after others.
  const int64_t sinks = *index->info().after == '\0' ? 4 : 0;
  const auto slot = static_cast<int32_t>(documents_.size());
  const auto skip = static_cast<int32_t>(std::min(index->info().sink, sinks));
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
      out.dense_fallback &= more.dense_fallback;
      out.keys_read += more.keys_read;
      out.keys_possible += more.keys_possible;
      out.bytes_read += more.bytes_read;
      out.bytes_dense += more.bytes_dense;
    }
    Reads all;
    all.add(out);
    out.delivered_budget = all.delivered_budget();
    out.delivered_keep = all.delivered_keep();
  }));
  return out;
}

Status IndexContext::reset_stats() {
  return caught([&] { session_->reset_stats(); });
}

}  // namespace sqz
