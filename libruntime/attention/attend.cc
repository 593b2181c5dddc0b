#include "libruntime/attention/attend.h"

#include <cmath>

namespace sqz {
namespace {

// Keys between two softmax steps of the stream path: many, because the processor's prefetchers
// start anew whenever reading changes from keys to values and back.
constexpr int64_t kStreamKeys = CodedProducts::kStreamKeys;
constexpr int64_t kTileKeys = CodedProducts::kTileKeys;  // with 64 rows, all buffers fit in L2
constexpr int64_t kMostKeys = std::max(kStreamKeys, kTileKeys);

// f(T*) with T the element type.
template <class Function>
auto with_elements(DType dtype, const Function& f) {
  switch (dtype) {
    case DType::kBF16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kF16:
      return f(static_cast<Float16*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

// Saturates at the largest finite number.
void store(float x, float& out) {
  out = x;
}
void store(float x, Float16& out) {
  out = to_float16(std::clamp(x, -65504.0f, 65504.0f));
}
void store(float x, BFloat16& out) {
  out = to_bfloat16(std::clamp(x, -0x1.fep127f, 0x1.fep127f));
}

}  // namespace

class RowAttention {
 public:
  RowAttention(const CpuKernels& kernels, const AttendRows& work, AttendWorkspace& workspace,
               const PartialRows& out)
      : k_(kernels),
        work_(work),
        keys_(*work.sequence.keys),
        out_(out),
        dim_(keys_.dim),
        d32_(padded_dim(dim_)),
        value_dim_(keys_.value_dim),
        v32_(padded_dim(value_dim_)),
        b_(workspace.buffers_),
        spans_(workspace.spans_.data()),
        pointers_(workspace.pointers_.data()),
        slots_(workspace.slots_.data()),
        products_(keys_.coded_keys.coded() ? &*workspace.products_ : nullptr) {}

  void run() {
    if (work_.rows <= kFewRows) {
      stream();
    } else {
      tile();
    }
  }

 private:
  // The keys of one softmax step, in spans_: short runs share one.
  struct Step {
    int span_count = 0;
    int64_t keys = 0;
    bool has_exact = false;
    const CodedHead* coded = nullptr;  // all keys of the step are its rows, or none is of codes
  };

  // The next keys, at most `most`; false if there are none.
  bool collect(KeyCursor& cursor, int64_t most, Step& step) {
    step = Step();
    step.coded = cursor.coded();
    while (step.keys < most && cursor.coded() == step.coded) {
      KeySpan& span = spans_[step.span_count];
      cursor.next(most - step.keys, span);
      if (span.count == 0) break;
      slots_[step.span_count++] = span.slots;
      step.has_exact |= span.exact_first >= 0;
      step.keys += span.count;
    }
    return step.keys > 0;
  }

  // Keys that the sliding window hides from a row get logit -infinity. Returns whether there are
  // any; then a logit that has overflown to it is NaN.
  bool hide(const Step& step, int64_t row_stride, int64_t key_stride) {
    if (work_.first_visible == nullptr || !step.has_exact) return false;
    const int64_t* const rows_end = work_.first_visible + work_.rows;
    const int64_t most = *std::max_element(work_.first_visible, rows_end);
    if (most <= spans_[0].exact_first) return false;
    int64_t column = 0;
    for (int s = 0; s < step.span_count; ++s) {
      const KeySpan& span = spans_[s];
      for (int64_t r = 0; r < work_.rows && span.exact_first >= 0; ++r) {
        const int64_t hidden = work_.first_visible[r] - span.exact_first;
        for (int64_t i = 0; i < span.count; ++i) {
          float& logit = b_.logits[r * row_stride + (column + i) * key_stride];
          logit = i < hidden ? kMinusInfinity : logit == kMinusInfinity ? NAN : logit;
        }
      }
      column += span.count;
    }
    return true;
  }

  // Pointers to the step's rows: keys [step.keys], then values.
  void point(const Step& step) {
    const int64_t size = dtype_size(keys_.dtype);
    const void** key = pointers_;
    const void** value = pointers_ + step.keys;
    for (int s = 0; s < step.span_count; ++s) {
      const KeyRows& rows = spans_[s].rows;
      for (int64_t i = 0; i < spans_[s].count; ++i) {
        *key++ = rows.keys + i * dim_ * size;
        *value++ = rows.values + i * value_dim_ * size;
      }
    }
  }

  // One run is not asked for early: there the processor's own prefetchers are better.
  static Ahead ahead(const Step& step, int64_t rows) {
    return {step.span_count > 1 ? CodedProducts::kAhead : 0, rows};
  }

  void stream() {
    const int64_t rows = work_.rows;
    pack_queries();
    std::fill(out_.maximum, out_.maximum + rows, kLowest);
    std::fill(out_.sum, out_.sum + rows, 0.0f);
    std::fill(b_.accumulator, b_.accumulator + rows * v32_, 0.0f);
    KeyCursor cursor(work_.sequence, work_.begin, work_.end);
    Step step;
    if (products_ != nullptr) {
      std::fill(b_.coded, b_.coded + rows * v32_, 0.0f);
      products_->load_few(work_.queries, rows, keys_.dtype);
    }
    while (collect(cursor, kStreamKeys, step)) {
      if (step.coded != nullptr) {
        stream_coded(step);
        continue;
      }
      point(step);
      stream_logits(step);
      k_.accumulate(keys_.dtype, b_.logits, kStreamKeys, rows, pointers_ + step.keys, step.keys,
                    value_dim_, b_.accumulator, ahead(step, step.keys));
    }
    k_.unpack(keys_.dtype, b_.accumulator, rows, value_dim_, out_.values, value_dim_);
    if (products_ == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      k_.unpack(DType::kI8, b_.coded + r * v32_, 1, value_dim_, b_.shares, value_dim_);
      for (int64_t c = 0; c < value_dim_; ++c) out_.values[r * value_dim_ + c] += b_.shares[c];
    }
  }

  std::span<const CodedSpan> slots(const Step& step) const {
    return {slots_, static_cast<size_t>(step.span_count)};
  }

  // In four sums that do not wait for each other.
  static float sum_of(const float* x, int64_t n) {
    float sums[4] = {};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      for (int64_t k = 0; k < 4; ++k) sums[k] += x[i + k];
    }
    for (; i < n; ++i) sums[0] += x[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // A key counts with its cluster's mean value and with its own codes.
  void stream_coded(const Step& step) {
    const int64_t rows = work_.rows;
    const auto spans = slots(step);
    products_->few(*step.coded, spans, b_.logits, kStreamKeys, keys_.coded_values);
    stream_softmax(step, work_.scale, true);
    int64_t column = 0, cluster = 0;
    for_each_cluster(spans, [&](int64_t count) {
      for (int64_t r = 0; r < rows; ++r) {
        b_.shares[r * kStreamKeys + cluster] = sum_of(b_.logits + r * kStreamKeys + column, count);
      }
      column += count;
      ++cluster;
    });
    const auto means = products_->stored_means(keys_.coded_values, spans);
    k_.accumulate(keys_.dtype, b_.shares, kStreamKeys, rows, means.data(), std::ssize(means),
                  value_dim_, b_.accumulator, {});
    const CodedProducts::Rows values = products_->rows_of(keys_.coded_values, spans);
    for (int64_t r = 0; r < rows; ++r) {
      float* row = b_.logits + r * kStreamKeys;
      for (int64_t j = 0; j < values.count; ++j) row[j] *= values.scales[j];
    }
    k_.accumulate(DType::kI8, b_.logits, kStreamKeys, rows, values.numbers, values.count,
                  value_dim_, b_.coded, {CodedProducts::kAhead, values.count});
  }

  void pack_queries() {
    const int64_t rows = work_.rows;
    bf16_ = k_.pack_bf16 != nullptr && keys_.dtype == DType::kBF16;
    for (int64_t r = 0; r < rows && bf16_; ++r) {
      // Half the length of a row of floats.
      bf16_ = k_.pack_bf16(work_.queries[r], dim_, 1, dim_, b_.queries + r * d32_ / 2);
    }
    if (bf16_) return;
    for (int64_t r = 0; r < rows; ++r) {
      k_.pack(keys_.dtype, work_.queries[r], dim_, 1, dim_, b_.queries + r * d32_);
    }
  }

  void stream_logits(const Step& step) {
    const int64_t rows = work_.rows, n = step.keys;
    const Ahead early = ahead(step, 2 * n);
    if (bf16_) {
      k_.dots_bf16(b_.queries, rows, pointers_, n, dim_, b_.logits, kStreamKeys, early);
    } else {
      k_.dots(keys_.dtype, b_.queries, rows, pointers_, n, dim_, b_.logits, kStreamKeys, early);
    }
    const bool hidden = hide(step, kStreamKeys, 1);
    stream_softmax(step, work_.scale, !hidden);
  }

  void stream_softmax(const Step& step, float scale, bool finite) {
    const int64_t rows = work_.rows, n = step.keys;
    for (int64_t r = 0; r < rows; ++r) {
      const float factor = k_.softmax_row(b_.logits + r * kStreamKeys, n, scale, finite,
                                          &out_.maximum[r], &out_.sum[r]);
      if (factor == 1.0f) continue;
      k_.scale(b_.accumulator + r * v32_, v32_, factor);
      if (products_ != nullptr) k_.scale(b_.coded + r * v32_, v32_, factor);
    }
  }

  void load(const Step& step, bool values) {
    float* to = b_.keys;
    const int64_t dim = values ? value_dim_ : dim_;
    for (int s = 0; s < step.span_count; ++s) {
      const KeySpan& span = spans_[s];
      k_.to_float(keys_.dtype, values ? span.rows.values : span.rows.keys, span.count, dim, to);
      to += span.count * padded_dim(dim);
    }
  }

  void transpose_queries(int64_t lanes) {
    bf16_ = k_.pair_bf16 != nullptr && keys_.dtype == DType::kBF16 &&
            k_.pair_bf16(work_.queries, work_.rows, lanes, dim_, b_.queries);
    if (bf16_) return;
    for (int64_t c = 0; c < dim_; ++c) {
      for (int64_t r = 0; r < lanes; ++r) {
        b_.queries[c * lanes + r] = r < work_.rows ? work_.queries[r][c] : 0.0f;
      }
    }
  }

  void tile_logits(const Step& step, int64_t lanes) {
    if (step.coded != nullptr) return products_->many(*step.coded, slots(step), b_.logits);
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
    std::fill(b_.accumulator, b_.accumulator + value_dim_ * lanes, 0.0f);
    if (products_ != nullptr) {
      std::fill(b_.coded, b_.coded + value_dim_ * lanes, 0.0f);
      products_->load_many(work_.queries, rows, lanes);
    }
    KeyCursor cursor(work_.sequence, work_.begin, work_.end);
    Step step;
    while (collect(cursor, kTileKeys, step)) {
      const int64_t keys = step.keys;
      tile_logits(step, lanes);
      const bool hidden = hide(step, 1, lanes);
      k_.softmax_lanes(b_.logits, keys, lanes, work_.scale, !hidden, b_.maximum, b_.sum, b_.factor);
      const bool same =
          std::all_of(b_.factor, b_.factor + lanes, [](float f) { return f == 1.0f; });
      if (!same) k_.scale_lanes(b_.accumulator, value_dim_, lanes, b_.factor);
      if (!same && products_ != nullptr) k_.scale_lanes(b_.coded, value_dim_, lanes, b_.factor);
      if (step.coded != nullptr) {
        tile_coded(step, lanes);
        continue;
      }
      load(step, true);
      k_.multiply(b_.keys, 1, v32_, b_.logits, b_.accumulator, value_dim_, keys, lanes, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      out_.maximum[r] = b_.maximum[r];
      out_.sum[r] = b_.sum[r];
      for (int64_t c = 0; c < value_dim_; ++c) {
        const float coded = products_ != nullptr ? b_.coded[c * lanes + r] : 0.0f;
        out_.values[r * value_dim_ + c] = b_.accumulator[c * lanes + r] + coded;
      }
    }
  }

  void tile_coded(const Step& step, int64_t lanes) {
    const auto spans = slots(step);
    const float* p = b_.logits;
    float* share = b_.shares;
    std::fill(share, share + std::ssize(spans) * lanes, 0.0f);
    for (const CodedSpan& span : spans) {
      for (int64_t i = 0; i < span.count; ++i, p += lanes) {
        for (int64_t r = 0; r < lanes; ++r) share[r] += p[r];
      }
      share += lanes;
    }
    k_.multiply(products_->means_of(keys_.coded_values, spans), 1, v32_, b_.shares, b_.accumulator,
                value_dim_, std::ssize(spans), lanes, true);
    k_.multiply(products_->scaled_rows(keys_.coded_values, spans), 1, v32_, b_.logits, b_.coded,
                value_dim_, step.keys, lanes, true);
  }

  const CpuKernels& k_;
  const AttendRows& work_;
  const HeadKeys& keys_;
  const PartialRows& out_;
  int64_t dim_, d32_;
  int64_t value_dim_, v32_;
  const AttendWorkspace::Buffers& b_;
  KeySpan* spans_;           // [kMostKeys] of the step
  const void** pointers_;    // [2 kMostKeys]
  CodedSpan* slots_;         // [kMostKeys] of the spans of a step of codes
  CodedProducts* products_;  // null if no keys are rows of codes
  bool bf16_ = false;        // queries are packed as BF16
};

HeadKeys head_keys(const LayerView& view, int64_t head) {
  const auto rows = [&](const void* keys, const void* values, int64_t count) {
    const int64_t before = head * count * dtype_size(view.dtype);
    return KeyRows{static_cast<const std::byte*>(keys) + before * view.head_dim,
                   static_cast<const std::byte*>(values) + before * view.value_dim};
  };
  HeadKeys out;
  out.dtype = view.dtype;
  out.dim = view.head_dim;
  out.value_dim = view.value_dim;
  out.exact_count = view.exact;
  if (view.exact > 0) out.exact = rows(view.exact_keys, view.exact_values, view.exact);
  if (view.keys != nullptr) out.slots = rows(view.keys, view.values, view.slots);
  if (view.coded_keys.bits == 0) return out;
  out.coded_keys = coded_head(view, view.coded_keys, false, head);
  out.coded_values = coded_head(view, view.coded_values, true, head);
  return out;
}

AttendWorkspace::AttendWorkspace(const CpuKernels& kernels, int64_t dim, int64_t widest, bool coded)
    : spans_(kMostKeys), pointers_(2 * kMostKeys), slots_(kMostKeys) {
  const auto take = [&](int64_t count) {
    return floats_.emplace_back(std::make_unique<float[]>(static_cast<size_t>(count))).get();
  };
  const int64_t rows = padded_dim(widest) * kTileRows;
  const int64_t logits = std::max(kFewRows * kStreamKeys, kTileKeys * kTileRows);
  buffers_ = {.queries = take(rows),
              .accumulator = take(rows),
              .logits = take(logits),
              .keys = take(kTileKeys * padded_dim(widest)),
              .maximum = take(kTileRows),
              .sum = take(kTileRows),
              .factor = take(kTileRows),
              .shares = take(logits),
              .coded = take(rows)};
  if (coded) products_.emplace(kernels, dim, widest);
}

void attend_rows(const CpuKernels& kernels, const AttendRows& work, AttendWorkspace& workspace,
                 const PartialRows& out) {
  RowAttention(kernels, work, workspace, out).run();
}

void add_partial(const PartialRows& into, const PartialRows& part, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float maximum = std::max(into.maximum[r], part.maximum[r]);
    const float old = std::exp(into.maximum[r] - maximum);
    const float fresh = std::exp(part.maximum[r] - maximum);
    into.maximum[r] = maximum;
    into.sum[r] = into.sum[r] * old + part.sum[r] * fresh;
    float* to = into.values + r * dim;
    const float* from = part.values + r * dim;
    for (int64_t c = 0; c < dim; ++c) to[c] = to[c] * old + from[c] * fresh;
  }
}

bool finish_row(const PartialRows& state, int64_t row, int64_t dim, DType dtype, void* out,
                float* lse) {
  const float sum = state.sum[row];
  const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  *lse = sum == 0 ? kMinusInfinity : state.maximum[row] + std::log(sum);
  const float* values = state.values + row * dim;
  bool finite = sum == 0 || std::isfinite(*lse);
  with_elements(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(out);
    for (int64_t c = 0; c < dim; ++c) {
      finite &= std::isfinite(values[c]);
      store(values[c] * inverse, to[c]);
    }
  });
  return finite;
}

void fill_rows(DType dtype, int64_t rows, int64_t dim, void* out, const LseRows& lse,
               float out_value, float lse_value) {
  with_elements(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(out);
    for (int64_t i = 0; i < rows * dim; ++i) store(out_value, to[i]);
  });
  for (int64_t row = 0; row < rows; ++row) lse[row] = lse_value;
}

bool to_finite_floats(DType dtype, const void* in, int64_t count, float* out) {
  return with_elements(dtype, [&](auto* type) {
    const auto* from = static_cast<const std::remove_pointer_t<decltype(type)>*>(in);
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float x = to_float(from[i]);
      bad |= (std::bit_cast<uint32_t>(x) & 0x7fffffffu) >= 0x7f800000u ? 1u : 0u;
      if (out != nullptr) out[i] = x;
    }
    return bad == 0;
  });
}

void store_floats(DType dtype, const float* in, int64_t count, void* out) {
  with_elements(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(out);
    for (int64_t i = 0; i < count; ++i) store(in[i], to[i]);
  });
}

void merge_rows(DType dtype, int64_t rows, int64_t dim, void* out_a, const LseRows& lse_a,
                const void* out_b, const ConstLseRows& lse_b, const Sinks& sinks) {
  with_elements(dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    auto* a = static_cast<Element*>(out_a);
    const auto* b = static_cast<const Element*>(out_b);
    for (int64_t r = 0; r < rows; ++r) {
      const bool sound = lse_a[r] < INFINITY && lse_b[r] < INFINITY;  // false for a NaN
      const float sink = sinks.data == nullptr ? kMinusInfinity : sinks.data[r % sinks.heads];
      if (sound && lse_b[r] == kMinusInfinity && sink == kMinusInfinity) continue;
      const float maximum = std::max({lse_a[r], lse_b[r], sink});
      const float both = std::exp(lse_a[r] - maximum) + std::exp(lse_b[r] - maximum);
      const float sum = both + std::exp(sink - maximum);
      const float share_a = std::exp(lse_a[r] - maximum) / sum;
      const float share_b = std::exp(lse_b[r] - maximum) / sum;
      for (int64_t i = r * dim; i < (r + 1) * dim; ++i) {
        // An empty side may hold anything: its 0 * NaN must not count.
        const float from_a = share_a == 0 ? 0.0f : share_a * to_float(a[i]);
        const float from_b = share_b == 0 ? 0.0f : share_b * to_float(b[i]);
        store(sound ? from_a + from_b : NAN, a[i]);
      }
      lse_a[r] = sound ? maximum + std::log(sum) : NAN;
    }
  });
}

}  // namespace sqz
