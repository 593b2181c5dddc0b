// A selection in device memory: between lookups, schedules and attention, and from one level
// of a lookup to the next. A pair is a (selection, KV head): pair = selection * Hkv + head. The
// keys of a pair, or its clusters, are its runs, end to end. Runs may touch.
#pragma once

#include <cstdint>

namespace sqz::cuda {

struct alignas(16) RunTotals {
  uint32_t runs = 0;
  uint32_t keys = 0;
  // Not 0: a logit was NaN or infinite; nothing is selected. Of a list that several requests share
  // (batch_lookup) a bit for each.
  uint32_t fault = 0;
  uint32_t exact = 0;  // exact keys of the pair, where a call may have several contexts
};

struct RunLists {
  RunTotals* totals = nullptr;  // [pairs]
  uint32_t* first = nullptr;    // [pairs, capacity + 1] first slot of each run, ascending
  uint32_t* before = nullptr;   // [pairs, capacity + 1] keys in the runs before; ends with all keys
  int64_t capacity = 0;
  bool of_heads = false;  // in place of pairs: [Hkv], the same lists for every selection

  // Sets the pointers.
  template <class Layout>
  void lay_out(Layout& layout, int64_t pairs) {
    totals = layout.template take<RunTotals>(pairs);
    first = layout.template take<uint32_t>(pairs * (capacity + 1));
    before = layout.template take<uint32_t>(pairs * (capacity + 1));
  }
};

}  // namespace sqz::cuda
