// Products of queries and rows of codes (formats/coded_rows.h): q . (mean + scale numbers), in
// float32. The product with a mean is taken once for all keys of its cluster.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/sqz_file.h"
#include "libruntime/kernels/cpu/kernels.h"

namespace sqz {

// Rows of codes of one KV head, and the means that they are differences to.
struct CodedHead {
  CodedRows rows;
  DType dtype = DType::kBF16;         // of means and scales
  int64_t dim = 0;                    // d
  const std::byte* means = nullptr;   // [n, d] of the finest clusters
  const uint32_t* offsets = nullptr;  // [n + 1] first slot of each
  int64_t clusters = 0;               // n

  bool coded() const { return rows.bits > 0; }
  const void* mean(int64_t cluster) const { return means + cluster * dim * dtype_size(dtype); }
  // The cluster of a slot. `from`: that cluster or an earlier one; the search starts there.
  int64_t cluster_of(int64_t slot, int64_t from = 0) const;
  // f(cluster, first, last) for each cluster with slots in [first, end). Returns `from` for the
  // next range, if that begins behind this one; `from` is 0 for the first range.
  template <class Function>
  int64_t for_each_cluster(int64_t first, int64_t end, int64_t from, const Function& f) const {
    from = cluster_of(first, from);
    for (int64_t cluster = from; first < end; ++cluster) {
      const int64_t last = std::min(end, int64_t{offsets[cluster + 1]});
      if (first < last) f(cluster, first, last);
      first = last;
    }
    return from;
  }
};

// The head's part of `rows`, which are a layer's keys or values. It has the means even if the rows
// have no codes, and is empty for a layer without clusters.
CodedHead coded_head(const LayerView& view, const CodedRows& rows, bool values, int64_t head);

// Slots of one cluster.
struct CodedSpan {
  int64_t first = 0, count = 0;
  int64_t cluster = 0;
};

// Whether spans[s] is the first of its cluster among neighbours.
inline bool begins_cluster(std::span<const CodedSpan> spans, size_t s) {
  return s == 0 || spans[s].cluster != spans[s - 1].cluster;
}

// f(count) for each group of neighbouring spans of one cluster, with `count` keys.
template <class Function>
void for_each_cluster(std::span<const CodedSpan> spans, const Function& f) {
  int64_t count = 0;
  for (size_t s = 0; s < spans.size(); ++s) {
    if (s > 0 && begins_cluster(spans, s)) f(std::exchange(count, 0));
    count += spans[s].count;
  }
  if (count > 0) f(count);
}

class CodedProducts {
 public:
  static constexpr int64_t kStreamKeys = 512;  // most keys of few()
  static constexpr int64_t kTileKeys = 64;     // and of many()
  static constexpr int64_t kAhead = 48;        // scattered rows asked into the cache early

  // dim: of queries and keys. widest: the most d or dv of any rows.
  CodedProducts(const CpuKernels& kernels, int64_t dim, int64_t widest);

  // Sets the queries of later calls: at most kFewRows for few(), at most kTileRows for many().
  // `lanes` is their number rounded up to kLanePad.
  void load_few(const float* const* queries, int64_t rows, DType means);
  void load_many(const float* const* queries, int64_t rows, int64_t lanes);

  // out[r * ld + j] = q_r . key j, over the keys of all spans. Allocation-free. Prefetches the rows
  // of `next` of the same slots.
  void few(const CodedHead& head, std::span<const CodedSpan> spans, float* out, int64_t ld,
           const CodedHead& next);
  // The same as [keys][lanes].
  void many(const CodedHead& head, std::span<const CodedSpan> spans, float* out);

  // The rows' codes and their scales. They are valid until the next call of any function.
  struct Rows {
    int64_t count = 0;
    const void* const* numbers = nullptr;  // [count] pointers to int8 [d]
    const float* scales = nullptr;         // [count]
  };
  Rows rows_of(const CodedHead& head, std::span<const CodedSpan> spans);
  // The same as scaled floats, [count][padded_dim]: at most kTileKeys.
  const float* scaled_rows(const CodedHead& head, std::span<const CodedSpan> spans);
  // The means of the spans as floats, [spans][padded_dim]: at most kTileKeys.
  const float* means_of(const CodedHead& head, std::span<const CodedSpan> spans);
  // Where the mean of each group of for_each_cluster() is stored.
  std::span<const void* const> stored_means(const CodedHead& head,
                                            std::span<const CodedSpan> spans);

 private:
  Ahead ask_early(const CodedHead& next, std::span<const CodedSpan> spans, int64_t n);

  const CpuKernels* kernels_;
  int64_t dim_, d32_;
  int64_t rows_ = 0, lanes_ = 0;
  bool bf16_ = false;
  bool i16_ = false;                    // few() takes query_numbers_
  std::vector<float> queries_;          // packed, or [d][lanes]
  std::vector<int16_t> query_numbers_;  // [kFewRows, d32]
  float query_scales_[kFewRows];
  std::vector<float> for_means_;  // packed
  std::vector<float> products_;   // of means: [kFewRows][kStreamKeys] or [kTileKeys][lanes]
  std::vector<float> floats_, mean_floats_;  // [kTileKeys][padded_dim]
  std::vector<float> scales_;                // [kStreamKeys]
  std::vector<const void*> pointers_, mean_pointers_;
};

}  // namespace sqz
