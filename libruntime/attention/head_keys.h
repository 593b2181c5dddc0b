// The keys and values that one block of queries attends to in one KV head, as one numbered
// sequence: exact keys (sinks and recent window), then the keys that are read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "libruntime/attention/coded_products.h"
#include "libruntime/selection.h"

namespace sqz {

// Rows as stored: keys [count, d], values [count, dv].
struct KeyRows {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
};

// Where a layer keeps the rows of one KV head.
struct HeadKeys {
  DType dtype = DType::kBF16;
  int64_t dim = 0, value_dim = 0;
  KeyRows exact;
  int64_t exact_count = 0;
  KeyRows slots;                       // rows of 16 bits, or
  CodedHead coded_keys, coded_values;  // rows of 8 bits
};

// The keys of a KV head of a layer. The result borrows from `view`.
HeadKeys head_keys(const LayerView& view, int64_t head);

struct KeySequence {
  const HeadKeys* keys = nullptr;
  const HeadSelection* selection = nullptr;

  int64_t exact_count() const { return keys->exact_count - selection->exact_skipped; }
  int64_t size() const { return exact_count() + selection->read.total; }
};

// Contiguous keys of one kind.
struct KeySpan {
  KeyRows rows;
  int64_t count = 0;
  int64_t exact_first = -1;          // index of the first among the exact keys; -1 for the others
  const CodedHead* coded = nullptr;  // the keys are these rows of codes, and `rows` is not used
  CodedSpan slots;                   // which ones
};

// Walks [begin, end) of a KeySequence.
class KeyCursor {
 public:
  KeyCursor(const KeySequence& sequence, int64_t begin, int64_t end)
      : keys_(*sequence.keys),
        skipped_(sequence.selection->exact_skipped),
        exact_count_(sequence.exact_count()),
        read_(sequence.selection->read.runs()),
        left_(end - begin),
        exact_at_(std::min(begin, exact_count_)) {
    int64_t skip = begin - exact_at_;
    while (read_at_ < read_.size() && skip >= read_[read_at_].length) {
      skip -= read_[read_at_++].length;
    }
    within_ = skip;
  }

  // The rows of codes that the next key is one of; null if it is stored otherwise.
  const CodedHead* coded() const {
    if (left_ == 0 || exact_at_ < exact_count_) return nullptr;
    return keys_.coded_keys.coded() ? &keys_.coded_keys : nullptr;
  }

  // At most `limit` keys; a count of 0 means the end.
  void next(int64_t limit, KeySpan& span) {
    const int64_t most = std::min(limit, left_);
    span = {};
    if (most == 0) return;
    if (exact_at_ < exact_count_) {
      span.count = std::min(most, exact_count_ - exact_at_);
      span.exact_first = exact_at_;
      span.rows = at(keys_.exact, skipped_ + exact_at_);
      exact_at_ += span.count;
    } else {
      const KeyRun& run = read_[read_at_];
      span.count = std::min(most, int64_t{run.length} - within_);
      if (const CodedHead* head = coded()) {
        place(span, *head, run.first + within_, span.count);
      } else {
        span.rows = at(keys_.slots, run.first + within_);
      }
      within_ += span.count;
      if (within_ == run.length) {
        within_ = 0;
        ++read_at_;
      }
    }
    left_ -= span.count;
  }

 private:
  // Slots from `first` on, as many of one cluster as `most` allows.
  void place(KeySpan& span, const CodedHead& head, int64_t first, int64_t most) {
    cluster_ = head.cluster_of(first, cluster_);
    span.coded = &head;
    span.count = std::min(most, head.offsets[cluster_ + 1] - first);
    span.slots = {first, span.count, cluster_};
  }

  KeyRows at(const KeyRows& rows, int64_t row) const {
    const int64_t before = row * dtype_size(keys_.dtype);
    return {rows.keys + before * keys_.dim, rows.values + before * keys_.value_dim};
  }

  const HeadKeys& keys_;
  int64_t skipped_, exact_count_;
  std::span<const KeyRun> read_;
  int64_t left_;
  int64_t exact_at_;
  size_t read_at_ = 0;   // the current run
  int64_t within_ = 0;   // keys of it that are done
  int64_t cluster_ = 0;  // of the last key
};

}  // namespace sqz
