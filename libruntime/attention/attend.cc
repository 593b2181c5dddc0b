#include "libruntime/attention/attend.h"

#include <cmath>

namespace sqz {
namespace {

// Keys between two softmax steps of the stream path: many, because the processor's prefetchers
// start anew whenever reading changes from keys to values and back.
constexpr int64_t kStreamKeys = 512;
constexpr int64_t kAhead = 48;     // rows
constexpr int64_t kTileKeys = 64;  // keys of a tile: with 64 rows, all buffers fit in L2
constexpr int64_t kMostKeys = std::max(kStreamKeys, kTileKeys);

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
        d32_(padded_dim(dim_)),
        spans_(workspace.spans_.data()),
        pointers_(workspace.pointers_.data()) {
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

  // The keys of one softmax step, in spans_: short runs share one.
  struct Step {
    int span_count = 0;
    int64_t keys = 0;
    bool has_bias = false;
    bool has_exact = false;
  };

  // The next keys, at most `most`; false if there are none.
  bool collect(KeyCursor& cursor, int64_t most, Step& step) {
    step = Step();
    while (step.keys < most) {
      const KeySpan span = cursor.next(most - step.keys);
      if (span.count == 0) break;
      step.has_bias |= span.bias != nullptr;
      step.has_exact |= span.exact_first >= 0;
      spans_[step.span_count++] = span;
      step.keys += span.count;
    }
    return step.keys > 0;
  }

  // [step.keys] what is added to the logits; null = nothing.
  const float* bias(const Step& step) {
    if (!step.has_bias) return nullptr;
    float* out = b_.bias;
    for (int s = 0; s < step.span_count; ++s) {
      const KeySpan& span = spans_[s];
      for (int64_t i = 0; i < span.count; ++i) *out++ = span.bias != nullptr ? span.bias[i] : 0.0f;
    }
    return b_.bias;
  }

  // Keys that the sliding window hides from a row get logit -infinity.
  void hide(const Step& step, int64_t row_stride, int64_t key_stride) {
    if (work_.first_visible == nullptr || !step.has_exact) return;
    int64_t column = 0;
    for (int s = 0; s < step.span_count; ++s) {
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

  // Pointers to the step's rows: keys [step.keys], then values.
  void point(const Step& step) {
    const int64_t row_bytes = dim_ * dtype_size(list_.dtype);
    const void** key = pointers_;
    const void** value = pointers_ + step.keys;
    for (int s = 0; s < step.span_count; ++s) {
      const KeyRows& rows = spans_[s].rows;
      for (int64_t i = 0; i < spans_[s].count; ++i) {
        *key++ = rows.keys + i * row_bytes;
        *value++ = rows.values + i * row_bytes;
      }
    }
  }

  // One run is not asked for early: there the processor's own prefetchers are better.
  static Ahead ahead(const Step& step, int64_t rows) {
    return {step.span_count > 1 ? kAhead : 0, rows};
  }

  void stream() {
    const int64_t rows = work_.rows;
    pack_queries();
    std::fill(out_.maximum, out_.maximum + rows, kLowest);
    std::fill(out_.sum, out_.sum + rows, 0.0f);
    std::fill(b_.accumulator, b_.accumulator + rows * d32_, 0.0f);
    KeyCursor cursor(list_, work_.begin, work_.end);
    Step step;
    while (collect(cursor, kStreamKeys, step)) {
      point(step);
      stream_logits(step);
      k_.accumulate(list_.dtype, b_.logits, kStreamKeys, rows, pointers_ + step.keys, step.keys,
                    dim_, b_.accumulator, ahead(step, step.keys));
    }
    k_.unpack(list_.dtype, b_.accumulator, rows, dim_, out_.values, dim_);
  }

  void pack_queries() {
    const int64_t rows = work_.rows;
    bf16_ = k_.pack_bf16 != nullptr && list_.dtype == DType::kBF16;
    for (int64_t r = 0; r < rows && bf16_; ++r) {
      // Half the length of a row of floats.
      bf16_ = k_.pack_bf16(work_.queries[r], dim_, 1, dim_, b_.queries + r * d32_ / 2);
    }
    if (bf16_) return;
    for (int64_t r = 0; r < rows; ++r) {
      k_.pack(list_.dtype, work_.queries[r], dim_, 1, dim_, b_.queries + r * d32_);
    }
  }

  void stream_logits(const Step& step) {
    const int64_t rows = work_.rows, n = step.keys;
    const Ahead early = ahead(step, 2 * n);
    if (bf16_) {
      k_.dots_bf16(b_.queries, rows, pointers_, n, dim_, b_.logits, kStreamKeys, early);
    } else {
      k_.dots(list_.dtype, b_.queries, rows, pointers_, n, dim_, b_.logits, kStreamKeys, early);
    }
    hide(step, kStreamKeys, 1);
    const float* added = bias(step);
    for (int64_t r = 0; r < rows; ++r) {
      const float factor = k_.softmax_row(b_.logits + r * kStreamKeys, added, n, work_.scale,
                                          &out_.maximum[r], &out_.sum[r]);
      if (factor != 1.0f) k_.scale(b_.accumulator + r * d32_, d32_, factor);
    }
  }

  void load(const Step& step, bool values) {
    float* to = b_.keys;
    for (int s = 0; s < step.span_count; ++s) {
      const KeySpan& span = spans_[s];
      k_.to_float(list_.dtype, values ? span.rows.values : span.rows.keys, span.count, dim_, to);
      to += span.count * d32_;
    }
  }

  void transpose_queries(int64_t lanes) {
    bf16_ = k_.pair_bf16 != nullptr && list_.dtype == DType::kBF16 &&
            k_.pair_bf16(work_.queries, work_.rows, lanes, dim_, b_.queries);
    if (bf16_) return;
    for (int64_t c = 0; c < dim_; ++c) {
      for (int64_t r = 0; r < lanes; ++r) {
        b_.queries[c * lanes + r] = r < work_.rows ? work_.queries[r][c] : 0.0f;
      }
    }
  }

  void tile_logits(const Step& step, int64_t lanes) {
    if (!bf16_) {
      load(step, false);
      k_.multiply(b_.keys, d32_, 1, b_.queries, b_.logits, step.keys, dim_, lanes, false);
      return;
    }
    float* to = b_.logits;
    for (int s = 0; s < step.span_count; ++s) {
      const KeySpan& span = spans_[s];
      k_.tile_bf16(b_.queries, lanes, span.rows.keys, span.count, dim_, to);
      to += span.count * lanes;
    }
  }

  void tile() {
    const int64_t rows = work_.rows;
    const int64_t lanes = round_up(rows, kLanePad);
    transpose_queries(lanes);
    std::fill(b_.maximum, b_.maximum + lanes, kLowest);
    std::fill(b_.sum, b_.sum + lanes, 0.0f);
    std::fill(b_.accumulator, b_.accumulator + dim_ * lanes, 0.0f);
    KeyCursor cursor(list_, work_.begin, work_.end);
    Step step;
    while (collect(cursor, kTileKeys, step)) {
      const int64_t keys = step.keys;
      tile_logits(step, lanes);
      hide(step, 1, lanes);
      k_.softmax_lanes(b_.logits, bias(step), keys, lanes, work_.scale, b_.maximum, b_.sum,
                       b_.factor);
      const bool same =
          std::all_of(b_.factor, b_.factor + lanes, [](float f) { return f == 1.0f; });
      if (!same) k_.scale_lanes(b_.accumulator, dim_, lanes, b_.factor);
      load(step, true);
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
  KeySpan* spans_;         // [kMostKeys] of the step
  const void** pointers_;  // [2 kMostKeys]
  bool bf16_ = false;      // queries are packed as BF16
};

AttendWorkspace::AttendWorkspace(int64_t dim)
    : floats_(static_cast<size_t>(RowAttention::floats(dim))),
      spans_(kMostKeys),
      pointers_(2 * kMostKeys) {}

void attend_rows(const CpuKernels& kernels, const AttendRows& work, AttendWorkspace& workspace,
                 const PartialRows& out) {
  RowAttention(kernels, work, workspace, out).run();
}

}  // namespace sqz
