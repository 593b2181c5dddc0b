// The keys that one block of queries attends to in one KV head, as one numbered sequence: exact
// keys (sink and tail), then the selected runs, then the estimated clusters, then the keys that are
// estimated by their codes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "libruntime/attention/coded_products.h"
#include "libruntime/select/selector.h"

namespace sqz {

// Rows of one KV head. Pointers as stored, [count, d].
struct KeyRows {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
};

struct KeyList {
  DType dtype = DType::kBF16;
  int64_t dim = 0;
  KeyRows exact;
  int64_t exact_count = 0;
  KeyRows slots;
  CodedHead coded_keys, coded_values;  // of the slots, in the place of `slots`
  std::span<const KeyRun> runs;
  int64_t run_keys = 0;
  std::array<KeyRows, kMaxLevels> centroids;            // with value means
  std::array<const float*, kMaxLevels> log_sizes = {};  // log N_i, added to an estimate's logit
  std::span<const ClusterRun> estimated;
  int64_t estimated_clusters = 0;
  CodedHead key_codes;              // of `guessed`
  std::span<const KeyRun> guessed;  // slots that count by their code and their cluster's mean value
  int64_t guessed_keys = 0;
  // Or, for few rows, which have the logits already: what they weigh together in each cluster. No
  // part of the sequence; counted with its last key.
  std::span<const ClusterRest> rests;

  int64_t size() const { return exact_count + run_keys + estimated_clusters + guessed_keys; }
};

// Contiguous keys of one kind.
struct KeySpan {
  KeyRows rows;
  const float* bias = nullptr;  // [count] added to the logits; null = 0
  int64_t count = 0;
  int64_t exact_first = -1;          // index of the first among the exact keys; -1 for the others
  const CodedHead* coded = nullptr;  // the keys are these rows of codes; `rows` is not used
  CodedSpan slots;                   // which ones
};

// Walks [begin, end) of a KeyList.
class KeyCursor {
 public:
  KeyCursor(const KeyList& list, int64_t begin, int64_t end)
      : list_(list), left_(end - begin), exact_at_(std::min(begin, list.exact_count)) {
    int64_t skip = begin - exact_at_;
    while (run_ < list.runs.size() && skip >= list.runs[run_].length) {
      skip -= list.runs[run_++].length;
    }
    if (run_ == list.runs.size()) {
      while (cluster_run_ < list.estimated.size() && skip >= list.estimated[cluster_run_].length) {
        skip -= list.estimated[cluster_run_++].length;
      }
      while (cluster_run_ == list.estimated.size() && guessed_run_ < list.guessed.size() &&
             skip >= list.guessed[guessed_run_].length) {
        skip -= list.guessed[guessed_run_++].length;
      }
    }
    within_ = skip;
  }

  // What the next key is a row of codes of; null if it is none.
  const CodedHead* coded() const {
    if (left_ == 0 || exact_at_ < list_.exact_count) return nullptr;
    if (run_ < list_.runs.size()) return list_.coded_keys.coded() ? &list_.coded_keys : nullptr;
    return cluster_run_ < list_.estimated.size() ? nullptr : &list_.key_codes;
  }

  // Whether the next key is not read, but counted by a centroid or a code.
  bool estimated() const {
    return left_ > 0 && exact_at_ >= list_.exact_count && run_ == list_.runs.size();
  }

  // At most `limit` keys; a count of 0 means the end.
  void next(int64_t limit, KeySpan& span) {
    const int64_t most = std::min(limit, left_);
    span = {};
    if (most == 0) return;
    if (exact_at_ < list_.exact_count) {
      span.count = std::min(most, list_.exact_count - exact_at_);
      span.exact_first = exact_at_;
      span.rows = at(list_.exact, exact_at_);
      exact_at_ += span.count;
    } else if (const CodedHead* head = coded()) {
      const bool guessed = run_ == list_.runs.size();
      const KeyRun& run = guessed ? list_.guessed[guessed_run_] : list_.runs[run_];
      place(span, *head, run.first + within_, std::min(most, int64_t{run.length} - within_));
      step(span.count, run.length, guessed ? guessed_run_ : run_);
    } else if (run_ < list_.runs.size()) {
      const KeyRun& run = list_.runs[run_];
      span.count = std::min(most, int64_t{run.length} - within_);
      span.rows = at(list_.slots, run.first + within_);
      step(span.count, run.length, run_);
    } else {
      const ClusterRun& run = list_.estimated[cluster_run_];
      span.count = std::min(most, int64_t{run.length} - within_);
      span.rows = at(list_.centroids[run.level], run.first + within_);
      span.bias = list_.log_sizes[run.level] + run.first + within_;
      step(span.count, run.length, cluster_run_);
    }
    left_ -= span.count;
  }

 private:
  // Slots from `first` on, as many of one cluster as `most` allows.
  void place(KeySpan& span, const CodedHead& head, int64_t first, int64_t most) {
    if (&head != span_of_ || first < head.offsets[cluster_]) cluster_ = 0;
    span_of_ = &head;
    cluster_ = head.cluster_of(first, cluster_);
    span.coded = &head;
    span.count = std::min(most, head.offsets[cluster_ + 1] - first);
    span.slots = {first, span.count, cluster_};
  }

  KeyRows at(const KeyRows& rows, int64_t row) const {
    const int64_t bytes = row * list_.dim * dtype_size(list_.dtype);
    return {rows.keys + bytes, rows.values + bytes};
  }
  void step(int64_t count, int64_t length, size_t& run) {
    within_ += count;
    if (within_ == length) {
      within_ = 0;
      ++run;
    }
  }

  const KeyList& list_;
  int64_t left_;
  int64_t exact_at_;
  size_t run_ = 0;
  size_t cluster_run_ = 0;
  size_t guessed_run_ = 0;
  const CodedHead* span_of_ = nullptr;  // whose cluster cluster_ is
  int64_t cluster_ = 0;
  int64_t within_ = 0;  // the current run
};

}  // namespace sqz
