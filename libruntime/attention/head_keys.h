// The keys and values that one block of queries attends to in one KV head, as one numbered
// sequence: exact keys (sinks and recent window), then the keys that are read, then the clusters
// that count as their centroids, then the keys that count by their codes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "libruntime/attention/coded_products.h"
#include "libruntime/index_tables.h"
#include "libruntime/selection.h"

namespace sqz {

// Rows as stored, [count, d].
struct KeyRows {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
};

// Where a layer keeps the rows of one KV head.
struct HeadKeys {
  DType dtype = DType::kBF16;
  int64_t dim = 0;
  KeyRows exact;
  int64_t exact_count = 0;
  KeyRows slots;                       // rows of 16 bits, or
  CodedHead coded_keys, coded_values;  // rows of 8 bits; the values' means are there in any case
  CodedHead key_codes;                 // without codes if the index has none
  std::array<KeyRows, kMaxLevels> centroids;            // with value means
  std::array<const float*, kMaxLevels> log_sizes = {};  // log N_i of each cluster
};

// The keys of a KV head of a layer. The result borrows from `view` and `table`.
HeadKeys head_keys(const LayerView& view, const LayerTable& table, int64_t head);

struct KeySequence {
  const HeadKeys* keys = nullptr;
  const HeadSelection* selection = nullptr;

  int64_t exact_count() const { return keys->exact_count - selection->exact_skipped; }
  // Empty if the selection has their weights instead.
  std::span<const KeyRun> by_code() const {
    return selection->weight_count > 0 ? std::span<const KeyRun>() : selection->by_code.runs();
  }
  int64_t size() const {
    const int64_t coded = selection->weight_count > 0 ? 0 : selection->by_code.total;
    return exact_count() + selection->read.total + selection->clusters.total + coded;
  }
};

// Contiguous keys of one kind.
struct KeySpan {
  KeyRows rows;
  const float* bias = nullptr;  // [count] added to the logits; null = 0
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
        clusters_(sequence.selection->clusters.runs()),
        by_code_(sequence.by_code()),
        left_(end - begin),
        exact_at_(std::min(begin, exact_count_)) {
    int64_t skip = begin - exact_at_;
    const auto pass = [&](const auto& runs, size_t& at) {
      while (at < runs.size() && skip >= runs[at].length) skip -= runs[at++].length;
      return at == runs.size();
    };
    (void)(pass(read_, read_at_) && pass(clusters_, cluster_at_) && pass(by_code_, code_at_));
    within_ = skip;
  }

  // The rows of codes that the next key is one of; null if it is stored otherwise.
  const CodedHead* coded() const {
    if (left_ == 0 || exact_at_ < exact_count_) return nullptr;
    if (read_at_ < read_.size()) return keys_.coded_keys.coded() ? &keys_.coded_keys : nullptr;
    return cluster_at_ < clusters_.size() ? nullptr : &keys_.key_codes;
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
    } else if (const CodedHead* head = coded()) {
      const bool read = read_at_ < read_.size();
      const KeyRun& run = read ? read_[read_at_] : by_code_[code_at_];
      place(span, *head, run.first + within_, std::min(most, int64_t{run.length} - within_));
      step(span.count, run.length, read ? read_at_ : code_at_);
    } else if (read_at_ < read_.size()) {
      const KeyRun& run = read_[read_at_];
      span.count = std::min(most, int64_t{run.length} - within_);
      span.rows = at(keys_.slots, run.first + within_);
      step(span.count, run.length, read_at_);
    } else {
      const ClusterRun& run = clusters_[cluster_at_];
      span.count = std::min(most, int64_t{run.length} - within_);
      span.rows = at(keys_.centroids[run.level], run.first + within_);
      span.bias = keys_.log_sizes[run.level] + run.first + within_;
      step(span.count, run.length, cluster_at_);
    }
    left_ -= span.count;
  }

 private:
  // Slots from `first` on, as many of one cluster as `most` allows.
  void place(KeySpan& span, const CodedHead& head, int64_t first, int64_t most) {
    if (&head != cluster_of_ || first < head.offsets[cluster_]) cluster_ = 0;
    cluster_of_ = &head;
    cluster_ = head.cluster_of(first, cluster_);
    span.coded = &head;
    span.count = std::min(most, head.offsets[cluster_ + 1] - first);
    span.slots = {first, span.count, cluster_};
  }

  KeyRows at(const KeyRows& rows, int64_t row) const {
    const int64_t bytes = row * keys_.dim * dtype_size(keys_.dtype);
    return {rows.keys + bytes, rows.values + bytes};
  }
  void step(int64_t count, int64_t length, size_t& run) {
    within_ += count;
    if (within_ == length) {
      within_ = 0;
      ++run;
    }
  }

  const HeadKeys& keys_;
  int64_t skipped_, exact_count_;
  std::span<const KeyRun> read_;
  std::span<const ClusterRun> clusters_;
  std::span<const KeyRun> by_code_;
  int64_t left_;
  int64_t exact_at_;
  size_t read_at_ = 0, cluster_at_ = 0, code_at_ = 0;  // the current run
  int64_t within_ = 0;                                 // keys of it that are done
  const CodedHead* cluster_of_ = nullptr;              // whose cluster cluster_ is
  int64_t cluster_ = 0;
};

}  // namespace sqz
