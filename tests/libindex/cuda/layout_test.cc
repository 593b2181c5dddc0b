// Means, slot order and tree order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "libindex/cuda/kmeans.h"
#include "libindex/cuda/layer/kernels.h"
#include "tests/libindex/cuda/device.h"

namespace sqz::cuda {
namespace {

using test::DeviceArray;
using test::from_bf16;
using test::random_rows;

// Random partitions of `points` into `clusters`, points ascending within each.
struct Partition {
  std::vector<uint32_t> order, offsets;
};

Partition random_partition(size_t heads, size_t points, size_t clusters, uint64_t seed) {
  std::mt19937_64 random(seed);
  Partition partition;
  for (size_t head = 0; head < heads; ++head) {
    std::vector<std::vector<uint32_t>> members(clusters);
    for (uint32_t i = 0; i < points; ++i) {
      members[i < clusters ? i : random() % clusters].push_back(i);
    }
    uint32_t offset = 0;
    for (const auto& cluster : members) {
      partition.offsets.push_back(offset);
      offset += static_cast<uint32_t>(cluster.size());
      partition.order.insert(partition.order.end(), cluster.begin(), cluster.end());
    }
    partition.offsets.push_back(offset);
  }
  return partition;
}

TEST(ClusterMeansTest, MatchFloat64) {
  SQZ_SKIP_WITHOUT_GPU();
  for (const int dim : {32, 64, 96, 128, 256}) {
    for (const bool weighted : {false, true}) {
      const size_t heads = 2, points = 5000, clusters = 7, d = static_cast<size_t>(dim);
      const auto rows = random_rows(heads * points, dim, 3, 5.0);
      const Partition partition = random_partition(heads, points, clusters, 4);
      std::vector<uint32_t> weights(heads * points);
      std::mt19937_64 random(5);
      for (auto& weight : weights) weight = weighted ? static_cast<uint32_t>(random() % 99 + 1) : 1;
      DeviceArray<uint16_t> rows_d(rows), means_d(heads * clusters * d);
      DeviceArray<uint32_t> weights_d(weights), order_d(partition.order),
          offsets_d(partition.offsets);
      const MeansParams params{
          {2, 5000, dim, 7}, false,           rows_d.get(), weighted ? weights_d.get() : nullptr,
          order_d.get(),     offsets_d.get(), means_d.get()};
      ASSERT_TRUE(cluster_means(params, nullptr).ok());
      const auto means = means_d.host();
      for (size_t head = 0; head < heads; ++head) {
        for (size_t c = 0; c < clusters; ++c) {
          const uint32_t* offsets = partition.offsets.data() + head * (clusters + 1) + c;
          for (size_t k = 0; k < d; ++k) {
            double sum = 0, total = 0;
            for (uint32_t i = offsets[0]; i < offsets[1]; ++i) {
              const size_t r = head * points + partition.order[head * points + i];
              sum += weights[r] * from_bf16(rows[r * d + k]);
              total += weights[r];
            }
            ASSERT_NEAR(from_bf16(means[(head * clusters + c) * d + k]), sum / total,
                        std::abs(sum / total) / 256 + 1e-5);
          }
        }
      }
    }
  }
}

TEST(GatherRowsTest, PutsRowsInSlotOrder) {
  SQZ_SKIP_WITHOUT_GPU();
  const size_t heads = 3, points = 1111;
  for (const int dim : {8, 96, 128}) {
    const auto rows = random_rows(heads * points, dim, 6);
    std::vector<uint32_t> order(heads * points);
    std::mt19937_64 random(7);
    for (size_t head = 0; head < heads; ++head) {
      const auto begin = order.begin() + static_cast<int64_t>(head * points);
      std::iota(begin, begin + static_cast<int64_t>(points), 0u);
      std::shuffle(begin, begin + static_cast<int64_t>(points), random);
    }
    DeviceArray<uint16_t> rows_d(rows), out_d(rows.size());
    DeviceArray<uint32_t> order_d(order);
    ASSERT_TRUE(
        gather_rows({3, 1111, dim, rows_d.get(), order_d.get(), out_d.get()}, nullptr).ok());
    const auto out = out_d.host();
    const auto d = static_cast<size_t>(dim);
    for (size_t i = 0; i < heads * points; ++i) {
      const size_t source = i / points * points + order[i];
      ASSERT_TRUE(std::equal(&out[i * d], &out[i * d] + d, &rows[source * d])) << "slot " << i;
    }
  }
}

TEST(DepthFirstOrderTest, ClustersFollowTheirParents) {
  SQZ_SKIP_WITHOUT_GPU();
  const size_t heads = 2, points = 9000, clusters = 2500;
  const Partition partition = random_partition(heads, points, clusters, 8);
  const Partition parents = random_partition(heads, clusters, 40, 9);
  DeviceArray<uint32_t> order_d(partition.order), offsets_d(partition.offsets),
      parents_d(parents.order), new_order_d(heads * points), new_offsets_d(heads * (clusters + 1));
  ASSERT_TRUE(depth_first_order({2, 9000, 2500, order_d.get(), offsets_d.get(), parents_d.get(),
                                 new_order_d.get(), new_offsets_d.get()},
                                nullptr)
                  .ok());
  const auto order = new_order_d.host(), offsets = new_offsets_d.host();
  for (size_t head = 0; head < heads; ++head) {
    uint32_t slot = 0;
    for (size_t c = 0; c < clusters; ++c) {
      ASSERT_EQ(offsets[head * (clusters + 1) + c], slot);
      const uint32_t old = parents.order[head * clusters + c];
      const uint32_t* run = partition.offsets.data() + head * (clusters + 1) + old;
      for (uint32_t i = run[0]; i < run[1]; ++i, ++slot) {
        ASSERT_EQ(order[head * points + slot], partition.order[head * points + i]);
      }
    }
    ASSERT_EQ(slot, points);
    ASSERT_EQ(offsets[head * (clusters + 1) + clusters], points);
  }
}

TEST(ClusterWeightsTest, AreTheKeysBelow) {
  SQZ_SKIP_WITHOUT_GPU();
  const size_t heads = 2, children = 3000, clusters = 300;
  const Partition partition = random_partition(heads, children, clusters, 11);
  std::vector<uint32_t> below(heads * children);
  std::mt19937_64 random(12);
  for (auto& weight : below) weight = static_cast<uint32_t>(random() % 50 + 1);
  DeviceArray<uint32_t> below_d(below), order_d(partition.order), offsets_d(partition.offsets);
  for (const bool weighted : {false, true}) {
    DeviceArray<uint32_t> weights_d(heads * clusters);
    ASSERT_TRUE(cluster_weights({2, 3000, 300, weighted ? below_d.get() : nullptr, order_d.get(),
                                 offsets_d.get(), weights_d.get()},
                                nullptr)
                    .ok());
    const auto weights = weights_d.host();
    for (size_t head = 0; head < heads; ++head) {
      for (size_t c = 0; c < clusters; ++c) {
        const uint32_t* offsets = partition.offsets.data() + head * (clusters + 1) + c;
        uint32_t expected = 0;
        for (uint32_t i = offsets[0]; i < offsets[1]; ++i) {
          const uint32_t child = partition.order[head * children + i];
          expected += weighted ? below[head * children + child] : 1;
        }
        ASSERT_EQ(weights[head * clusters + c], expected) << "head " << head << " cluster " << c;
      }
    }
  }
}

TEST(LayoutArgumentsTest, WrongShapes) {
  EXPECT_EQ(gather_rows({1, 10, 12, nullptr, nullptr, nullptr}, nullptr).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(
      depth_first_order({1, 3, 4, nullptr, nullptr, nullptr, nullptr, nullptr}, nullptr).code(),
      Code::kInvalidArgument);
}

}  // namespace
}  // namespace sqz::cuda
