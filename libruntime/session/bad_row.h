// The first of the query rows in which the threads of a loop found a NaN or an infinity, whatever
// the order in which they found them.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "formats/base/status.h"

namespace sqz {

class BadRow {
 public:
  void reset() { row_ = kNone; }
  // row: token * query heads + head.
  void note(int64_t row) {
    int64_t seen = row_;
    while (row < seen && !row_.compare_exchange_weak(seen, row)) {
    }
  }
  // kNumeric if there is one; `what` opens the sentence.
  Status status(const char* what, int64_t layer, int64_t query_heads) const {
    const int64_t row = row_;
    if (row == kNone) return {};
    return {Code::kNumeric, concat(what, " of layer ", layer, ", token ", row / query_heads,
                                   ", query head ", row % query_heads, " is NaN or infinite")};
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> row_{kNone};
};

}  // namespace sqz
