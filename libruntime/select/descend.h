// One step down the centroid tree: from the clusters that a level keeps to their children.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "libruntime/select/score.h"

namespace sqz {

// The alive clusters of one level of one KV head: what a ScoreProblem scores. The i-th of them is
// meant by `chosen[i]` of a rule.
struct Candidates {
  std::span<const ClusterRange> ranges;  // ascending, disjoint
  std::span<const uint32_t> sizes;       // [n] keys of each
};

// f(i, cluster) for every i with chosen[i] != 0, ascending; cluster: its index in the level.
template <class Function>
void for_each_chosen(std::span<const ClusterRange> ranges, std::span<const uint8_t> chosen,
                     const Function& f) {
  size_t i = 0;
  for (const ClusterRange& range : ranges) {
    for (uint32_t cluster = range.first; cluster < range.first + range.count; ++cluster, ++i) {
      if (chosen[i] != 0) f(i, cluster);
    }
  }
}

// The children of the chosen clusters, neighbours in one range. offsets: of the parents' level,
// [all + 1], the first child of each; child_sizes: keys of every child of the level. The answer
// lies in `ranges` and `sizes`, which have room for all children.
Candidates children_of_chosen(std::span<const ClusterRange> parents,
                              std::span<const uint8_t> chosen, const uint32_t* offsets,
                              const uint32_t* child_sizes, std::span<ClusterRange> ranges,
                              std::span<uint32_t> sizes);

}  // namespace sqz
