// Mutations that leave everything else where it is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace sqz {

// Changes data[first, first + count). What gets shorter is filled up with `fill`, and what is
// `fill` already at the end is room to grow.
inline void mutate_part(uint8_t* data, size_t first, size_t count, uint8_t fill) {
  if (count == 0) return;
  std::vector<uint8_t> part(data + first, data + first + count);
  size_t used = count;
  while (fill != 0 && used > 0 && part[used - 1] == fill) --used;
  used = LLVMFuzzerMutate(part.data(), used, count);
  std::fill(part.begin() + static_cast<std::ptrdiff_t>(used), part.end(), fill);
  std::copy(part.begin(), part.end(), data + first);
}

// Changes some bytes at a place in data[first, end) that is a multiple of four.
inline void mutate_numbers(uint8_t* data, size_t first, size_t end, std::minstd_rand& random) {
  if (first == end) return;
  const size_t count = std::min<size_t>(4 << random() % 5, end - first);
  mutate_part(data, first + random() % (end - first - count + 1) / 4 * 4, count, 0);
}

}  // namespace sqz
