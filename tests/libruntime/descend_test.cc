#include "libruntime/select/descend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

// Ten parents with two children each, but for the third and the eighth, which have none.
const std::vector<uint32_t> kOffsets = {0, 2, 4, 4, 6, 8, 10, 12, 12, 14, 16};

struct Children {
  std::vector<std::pair<uint32_t, uint32_t>> ranges;
  std::vector<uint32_t> sizes;
};

Children children(const std::vector<ClusterRange>& parents, const std::vector<uint8_t>& chosen) {
  std::vector<uint32_t> child_sizes;
  for (uint32_t i = 0; i < 16; ++i) child_sizes.push_back(100 + i);
  std::vector<ClusterRange> ranges(16);
  std::vector<uint32_t> sizes(16);
  const AliveClusters alive =
      children_of_chosen(parents, chosen, kOffsets.data(), child_sizes.data(), ranges, sizes);
  Children out;
  for (const ClusterRange& range : alive.ranges) out.ranges.emplace_back(range.first, range.count);
  out.sizes.assign(alive.sizes.begin(), alive.sizes.end());
  return out;
}

TEST(Descend, PlacesAmongTheAliveAreClustersOfTheLevel) {
  const std::vector<ClusterRange> ranges = {{2, 3}, {7, 2}};
  std::vector<std::pair<size_t, uint32_t>> seen;
  for_each_chosen(ranges, std::vector<uint8_t>{1, 0, 1, 1, 0},
                  [&](size_t i, uint32_t cluster) { seen.emplace_back(i, cluster); });
  EXPECT_THAT(seen, ElementsAre(Pair(0, 2), Pair(2, 4), Pair(3, 7)));
}

TEST(Descend, NeighboursAndChildlessParentsBetweenThemMakeOneRange) {
  const Children found = children({{0, 5}, {6, 3}}, {0, 1, 1, 1, 0, 1, 1, 1});
  EXPECT_THAT(found.ranges, ElementsAre(Pair(2, 4), Pair(10, 4)));
  EXPECT_THAT(found.sizes, ElementsAre(102, 103, 104, 105, 110, 111, 112, 113));
}

TEST(Descend, NothingChosenLeavesNothing) {
  const Children found = children({{0, 10}}, std::vector<uint8_t>(10, 0));
  EXPECT_THAT(found.ranges, IsEmpty());
  EXPECT_THAT(found.sizes, IsEmpty());
}

}  // namespace
}  // namespace sqz
