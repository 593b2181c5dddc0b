#include "libruntime/attention/coded_products.h"

#include <algorithm>

namespace sqz {
namespace {

// Scales of slots [first, first + count).
void load_scales(const CodedHead& head, int64_t first, int64_t count, float* out) {
  const auto* bf16 = static_cast<const BFloat16*>(head.rows.scales) + first;
  const auto* f16 = static_cast<const Float16*>(head.rows.scales) + first;
  if (head.dtype == DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(bf16[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(f16[i]);
  }
}

}  // namespace

int64_t CodedHead::cluster_of(int64_t slot, int64_t from) const {
  const auto sought = static_cast<uint32_t>(slot);
  const uint32_t* begin = offsets + from;
  const uint32_t* const end = offsets + clusters + 1;
  std::ptrdiff_t step = 1;
  for (; step < end - begin && begin[step] <= sought; step *= 2) begin += step;
  return std::upper_bound(begin, begin + std::min(step, end - begin), sought) - offsets - 1;
}

CodedHead coded_head(const LayerView& view, const CodedRows& rows, bool values, int64_t head) {
  if (view.levels == 0) return {};
  const LevelView& finest = view.level[static_cast<size_t>(view.levels - 1)];
  const void* means = values ? finest.value_means : finest.centroids;
  const int64_t dim = values ? view.value_dim : view.head_dim;
  return {.rows = rows.from_head(head, view.slots, dim),
          .dtype = view.dtype,
          .dim = dim,
          .means = static_cast<const std::byte*>(means) +
                   head * finest.clusters * dim * dtype_size(view.dtype),
          .offsets = finest.offsets + head * (finest.clusters + 1),
          .clusters = finest.clusters};
}

CodedProducts::CodedProducts(const CpuKernels& kernels, int64_t dim, int64_t widest)
    : kernels_(&kernels),
      dim_(dim),
      d32_(padded_dim(dim)),
      queries_(static_cast<size_t>(d32_ * kTileRows)),
      query_numbers_(static_cast<size_t>(d32_ * kFewRows)),
      for_means_(queries_.size()),
      products_(static_cast<size_t>(std::max(kFewRows * kStreamKeys, kTileKeys * kTileRows))),
      floats_(static_cast<size_t>(kTileKeys * padded_dim(widest))),
      mean_floats_(floats_.size()),
      scales_(static_cast<size_t>(kStreamKeys)),
      pointers_(static_cast<size_t>(2 * kStreamKeys)),
      mean_pointers_(static_cast<size_t>(kStreamKeys)) {}

void CodedProducts::load_few(const float* const* queries, int64_t rows, DType means) {
  rows_ = rows;
  bf16_ = kernels_->pack_bf16 != nullptr && means == DType::kBF16;
  i16_ = kernels_->pack_i16 != nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    i16_ = i16_ && kernels_->pack_i16(queries[r], dim_, query_numbers_.data() + r * d32_,
                                      query_scales_ + r);
    kernels_->pack(DType::kI8, queries[r], dim_, 1, dim_, queries_.data() + r * d32_);
    bf16_ =
        bf16_ && kernels_->pack_bf16(queries[r], dim_, 1, dim_, for_means_.data() + r * d32_ / 2);
  }
  for (int64_t r = 0; r < rows && !bf16_; ++r) {
    kernels_->pack(means, queries[r], dim_, 1, dim_, for_means_.data() + r * d32_);
  }
}

void CodedProducts::load_many(const float* const* queries, int64_t rows, int64_t lanes) {
  rows_ = rows;
  lanes_ = lanes;
  for (int64_t r = 0; r < lanes; ++r) {
    for (int64_t c = 0; c < dim_; ++c) queries_[c * lanes + r] = r < rows ? queries[r][c] : 0.0f;
  }
}

CodedProducts::Rows CodedProducts::rows_of(const CodedHead& head,
                                           std::span<const CodedSpan> spans) {
  for (const CodedSpan& span : spans)
    prefetch_row(head.rows.scales, 2 * span.first, 2 * span.first + 1);
  int64_t n = 0;
  for (const CodedSpan& span : spans) {
    const std::byte* codes = head.rows.codes + span.first * head.dim;
    for (int64_t i = 0; i < span.count; ++i) pointers_[n + i] = codes + i * head.dim;
    load_scales(head, span.first, span.count, scales_.data() + n);
    n += span.count;
  }
  return {n, pointers_.data(), scales_.data()};
}

const float* CodedProducts::scaled_rows(const CodedHead& head, std::span<const CodedSpan> spans) {
  const Rows rows = rows_of(head, spans);
  for (int64_t j = 0; j < rows.count; ++j) {
    float* to = floats_.data() + j * padded_dim(head.dim);
    kernels_->to_float(DType::kI8, rows.numbers[j], 1, head.dim, to);
    for (int64_t c = 0; c < padded_dim(head.dim); ++c) to[c] *= rows.scales[j];
  }
  return floats_.data();
}

std::span<const void* const> CodedProducts::stored_means(const CodedHead& head,
                                                         std::span<const CodedSpan> spans) {
  size_t count = 0;
  for (size_t s = 0; s < spans.size(); ++s) {
    if (begins_cluster(spans, s)) mean_pointers_[count++] = head.mean(spans[s].cluster);
  }
  return std::span(mean_pointers_).first(count);
}

// Behind the pointers to rows.
Ahead CodedProducts::ask_early(const CodedHead& next, std::span<const CodedSpan> spans, int64_t n) {
  const void** to = pointers_.data() + n;
  for (const CodedSpan& span : spans) {
    const std::byte* codes = next.rows.codes + span.first * next.dim;
    prefetch_row(next.rows.scales, 2 * span.first, 2 * span.first + 1);
    for (int64_t i = 0; i < span.count; ++i) *to++ = codes + i * next.dim;
  }
  return {kAhead, 2 * n};
}

const float* CodedProducts::means_of(const CodedHead& head, std::span<const CodedSpan> spans) {
  float* to = mean_floats_.data();
  for (const CodedSpan& span : spans) {
    kernels_->to_float(head.dtype, head.mean(span.cluster), 1, head.dim, to);
    to += padded_dim(head.dim);
  }
  return mean_floats_.data();
}

void CodedProducts::few(const CodedHead& head, std::span<const CodedSpan> spans, float* out,
                        int64_t ld, const CodedHead& next) {
  const Rows rows = rows_of(head, spans);
  const Ahead early = ask_early(next, spans, rows.count);
  if (i16_) {
    kernels_->dots_i16(query_numbers_.data(), query_scales_, rows_, rows.numbers, rows.count, dim_,
                       out, ld, early);
  } else {
    kernels_->dots(DType::kI8, queries_.data(), rows_, rows.numbers, rows.count, dim_, out, ld,
                   early);
  }
  const auto means = stored_means(head, spans);
  if (bf16_) {
    kernels_->dots_bf16(for_means_.data(), rows_, means.data(), std::ssize(means), dim_,
                        products_.data(), kStreamKeys, {});
  } else {
    kernels_->dots(head.dtype, for_means_.data(), rows_, means.data(), std::ssize(means), dim_,
                   products_.data(), kStreamKeys, {});
  }
  int64_t column = 0, cluster = 0;
  for_each_cluster(spans, [&](int64_t count) {
    for (int64_t r = 0; r < rows_; ++r) {
      const float mean = products_[r * kStreamKeys + cluster];
      float* row = out + r * ld + column;
      for (int64_t i = 0; i < count; ++i) row[i] = row[i] * rows.scales[column + i] + mean;
    }
    column += count;
    ++cluster;
  });
}

void CodedProducts::many(const CodedHead& head, std::span<const CodedSpan> spans, float* out) {
  const float* rows = scaled_rows(head, spans);
  int64_t n = 0;
  for (const CodedSpan& span : spans) n += span.count;
  kernels_->multiply(rows, d32_, 1, queries_.data(), out, n, dim_, lanes_, false);
  kernels_->multiply(means_of(head, spans), d32_, 1, queries_.data(), products_.data(),
                     std::ssize(spans), dim_, lanes_, false);
  const float* mean = products_.data();
  for (const CodedSpan& span : spans) {
    for (int64_t i = 0; i < span.count; ++i, out += lanes_) {
      for (int64_t r = 0; r < lanes_; ++r) out[r] += mean[r];
    }
    mean += lanes_;
  }
}

}  // namespace sqz
