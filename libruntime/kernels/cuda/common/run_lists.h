// What was selected, in device memory: between lookups, schedules and attention. A pair is a
// (selection, KV head): pair = selection * Hkv + head. The keys of a pair are its runs, end to end.
// Runs may touch.
#pragma once

#include <cstdint>

namespace sqz::cuda {

inline constexpr int kMarkKeys = 128;

struct alignas(16) RunTotals {
  uint32_t runs = 0;
  uint32_t keys = 0;
  uint32_t fault = 0;  // 1: a logit was NaN or infinite; nothing is selected
  uint32_t reserved = 0;
};

struct RunLists {
  RunTotals* totals = nullptr;  // [pairs]
  uint32_t* first = nullptr;    // [pairs, capacity + 1] first slot of each run, ascending
  uint32_t* before = nullptr;   // [pairs, capacity + 1] keys in the runs before; ends with all keys
  uint32_t* marks = nullptr;    // [pairs, marks] the run that holds key kMarkKeys * i
  int64_t capacity = 0;
  int64_t mark_capacity = 0;  // at least ceil(M / kMarkKeys)
  bool of_heads = false;      // in place of pairs: [Hkv], the same lists for every selection
};

}  // namespace sqz::cuda
