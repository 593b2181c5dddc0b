#include "libruntime/select/descend.h"

#include <algorithm>

namespace sqz {

Candidates children_of_chosen(std::span<const ClusterRange> parents,
                              std::span<const uint8_t> chosen, const uint32_t* offsets,
                              const uint32_t* child_sizes, std::span<ClusterRange> ranges,
                              std::span<uint32_t> sizes) {
  size_t used = 0;
  for_each_chosen(parents, chosen, [&](size_t, uint32_t parent) {
    const uint32_t first = offsets[parent], count = offsets[parent + 1] - first;
    if (count == 0) return;
    if (used > 0 && ranges[used - 1].first + ranges[used - 1].count == first) {
      ranges[used - 1].count += count;
    } else {
      ranges[used++] = {first, count};
    }
  });
  auto end = sizes.begin();
  for (const ClusterRange& range : ranges.first(used)) {
    end = std::copy_n(child_sizes + range.first, range.count, end);
  }
  return {ranges.first(used), {sizes.begin(), end}};
}

}  // namespace sqz
