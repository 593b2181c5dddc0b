#include "libruntime/attention/attend.h"

#include <cmath>
#include <limits>

namespace sqz {
namespace {

constexpr int64_t kStreamKeys = 128;  // keys between two softmax steps of the stream path
constexpr int64_t kTileKeys = 64;     // keys of a tile: with 64 rows, all buffers fit in L2
constexpr int64_t kMostKeys = std::max(kStreamKeys, kTileKeys);
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

class RowAttention {
 public:
  RowAttention(const CpuKernels& kernels, const AttendRows& work, AttendWorkspace& workspace,
               const PartialRows& out)
      : k_(kernels),
        work_(work),
        list_(*work.list),
        out_(out),
        dim_(list_.dim),
        d32_(padded_dim(dim_)) {
    cut(dim_, workspace.floats_.data(), &b_);
  }

  static int64_t floats(int64_t dim) { return cut(dim, nullptr, nullptr); }

  void run() {
    if (work_.rows <= kFewRows) {
      stream();
    } else {
      tile();
    }
  }

 private:
  struct Buffers {
    float* queries;      // stream: packed [kFewRows, d32]; tile: transposed [d32, kTileRows]
    float* accumulator;  // the same shapes
    float* logits;       // stream: [kFewRows, kStreamKeys]; tile: [kTileKeys, kTileRows]
    float* keys;         // [kTileKeys, d32]: keys, then values
    float* bias;         // [kMostKeys]
    float* maximum;      // [kTileRows]
    float* sum;          // [kTileRows]
    float* factor;       // [kTileRows]
  };

  static int64_t cut(int64_t dim, float* base, Buffers* buffers) {
    const int64_t d32 = padded_dim(dim);
    int64_t used = 0;
    const auto take = [&](int64_t count) {
      float* at = base == nullptr ? nullptr : base + used;
      used += count;
      return at;
    };
    const Buffers b = {take(d32 * kTileRows),
                       take(d32 * kTileRows),
                       take(std::max(kFewRows * kStreamKeys, kTileKeys * kTileRows)),
                       take(kTileKeys * d32),
                       take(kMostKeys),
                       take(kTileRows),
                       take(kTileRows),
                       take(kTileRows)};
    if (buffers != nullptr) *buffers = b;
    return used;
  }

  // Collects the next keys, at most `most`, into spans_. Short runs share one softmax step.
  int64_t collect(KeyCursor& cursor, int64_t most) {
    span_count_ = 0;
    has_bias_ = has_exact_ = false;
    int64_t keys = 0;
    while (keys < most) {
      const KeySpan span = cursor.next(most - keys);
      if (span.count == 0) break;
      has_bias_ |= span.bias != nullptr;
      has_exact_ |= span.exact_first >= 0;
      spans_[span_count_++] = span;
      keys += span.count;
    }
    if (!has_bias_) return keys;
    float* bias = b_.bias;
    for (int s = 0; s < span_count_; ++s) {
      for (int64_t i = 0; i < spans_[s].count; ++i) {
        *bias++ = spans_[s].bias != nullptr ? spans_[s].bias[i] : 0.0f;
      }
    }
    return keys;
  }

  // Keys that the sliding window hides from a row get logit -infinity.
  void hide(int64_t row_stride, int64_t key_stride) {
    if (work_.first_visible == nullptr || !has_exact_) return;
    int64_t column = 0;
    for (int s = 0; s < span_count_; ++s) {
      const KeySpan& span = spans_[s];
      for (int64_t r = 0; r < work_.rows && span.exact_first >= 0; ++r) {
        const int64_t hidden =
            std::clamp<int64_t>(work_.first_visible[r] - span.exact_first, 0, span.count);
        for (int64_t i = 0; i < hidden; ++i) {
          b_.logits[r * row_stride + (column + i) * key_stride] = kMinusInfinity;
        }
      }
      column += span.count;
    }
  }

  void stream() {
    const int64_t rows = work_.rows;
    for (int64_t r = 0; r < rows; ++r) {
      k_.pack(list_.dtype, work_.queries[r], dim_, 1, dim_, b_.queries + r * d32_);
      out_.maximum[r] = kLowest;
      out_.sum[r] = 0;
    }
    std::fill(b_.accumulator, b_.accumulator + rows * d32_, 0.0f);
    KeyCursor cursor(list_, work_.begin, work_.end);
    while (const int64_t keys = collect(cursor, kStreamKeys)) {
      float* logits = b_.logits;
      for (int s = 0; s < span_count_; ++s) {
        const KeySpan& span = spans_[s];
        k_.dots(list_.dtype, b_.queries, rows, span.rows.keys, span.count, dim_, logits,
                kStreamKeys);
        logits += span.count;
      }
      hide(kStreamKeys, 1);
      for (int64_t r = 0; r < rows; ++r) {
        const float factor =
            k_.softmax_row(b_.logits + r * kStreamKeys, has_bias_ ? b_.bias : nullptr, keys,
                           work_.scale, &out_.maximum[r], &out_.sum[r]);
        if (factor != 1.0f) k_.scale(b_.accumulator + r * d32_, d32_, factor);
      }
      const float* weights = b_.logits;
      for (int s = 0; s < span_count_; ++s) {
        const KeySpan& span = spans_[s];
        k_.accumulate(list_.dtype, weights, kStreamKeys, rows, span.rows.values, span.count, dim_,
                      b_.accumulator);
        weights += span.count;
      }
    }
    k_.unpack(list_.dtype, b_.accumulator, rows, dim_, out_.values, dim_);
  }

  void load(bool values) {
    float* to = b_.keys;
    for (int s = 0; s < span_count_; ++s) {
      const KeySpan& span = spans_[s];
      k_.to_float(list_.dtype, values ? span.rows.values : span.rows.keys, span.count, dim_, to);
      to += span.count * d32_;
    }
  }

  void tile() {
    const int64_t rows = work_.rows;
    const int64_t lanes = round_up(rows, kLanePad);
    for (int64_t c = 0; c < dim_; ++c) {
      for (int64_t r = 0; r < lanes; ++r) {
        b_.queries[c * lanes + r] = r < rows ? work_.queries[r][c] : 0.0f;
      }
    }
    std::fill(b_.maximum, b_.maximum + lanes, kLowest);
    std::fill(b_.sum, b_.sum + lanes, 0.0f);
    std::fill(b_.accumulator, b_.accumulator + dim_ * lanes, 0.0f);
    KeyCursor cursor(list_, work_.begin, work_.end);
    while (const int64_t keys = collect(cursor, kTileKeys)) {
      load(false);
      k_.multiply(b_.keys, d32_, 1, b_.queries, b_.logits, keys, dim_, lanes, false);
      hide(1, lanes);
      k_.softmax_lanes(b_.logits, has_bias_ ? b_.bias : nullptr, keys, lanes, work_.scale,
                       b_.maximum, b_.sum, b_.factor);
      const bool same =
          std::all_of(b_.factor, b_.factor + lanes, [](float f) { return f == 1.0f; });
      if (!same) k_.scale_lanes(b_.accumulator, dim_, lanes, b_.factor);
      load(true);
      k_.multiply(b_.keys, 1, d32_, b_.logits, b_.accumulator, dim_, keys, lanes, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      out_.maximum[r] = b_.maximum[r];
      out_.sum[r] = b_.sum[r];
      for (int64_t c = 0; c < dim_; ++c) {
        out_.values[r * dim_ + c] = b_.accumulator[c * lanes + r];
      }
    }
  }

  const CpuKernels& k_;
  const AttendRows& work_;
  const KeyList& list_;
  const PartialRows& out_;
  int64_t dim_;
  int64_t d32_;
  Buffers b_{};
  std::array<KeySpan, kMostKeys> spans_;
  int span_count_ = 0;
  bool has_bias_ = false;
  bool has_exact_ = false;
};

AttendWorkspace::AttendWorkspace(int64_t dim)
    : floats_(static_cast<size_t>(RowAttention::floats(dim))) {}

void attend_rows(const CpuKernels& kernels, const AttendRows& work, AttendWorkspace& workspace,
                 const PartialRows& out) {
  RowAttention(kernels, work, workspace, out).run();
}

}  // namespace sqz
