// Tensors and lists of runs on the GPU for the prefill tests.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "formats/base/dtype.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"
#include "tests/libindex/cuda/capability.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/served_index.h"

namespace sqz::cuda::test {

// Numbers as stored in BF16 or F16, here and on the GPU.
struct Tensor {
  DType dtype;
  std::vector<float> values;  // rounded
  std::unique_ptr<DeviceArray<uint16_t>> device;

  Tensor(DType type, int64_t count, float scale, testing::Random& random)
      : dtype(type), values(testing::rounded(type, random.normals(count, scale))) {
    upload();
  }
  void upload() {
    const auto bytes = testing::stored(dtype, values);
    // A tensor of no elements still has an address.
    std::vector<uint16_t> bits(std::max<size_t>(values.size(), 1));
    std::memcpy(bits.data(), bytes.data(), bytes.size());
    device = std::make_unique<DeviceArray<uint16_t>>(bits);
  }
};

struct SlotRun {
  uint32_t first, length;
};

// Lists of runs as the kernels take and leave them.
struct DeviceRuns {
  DeviceArray<RunTotals> totals;
  DeviceArray<uint32_t> first, before;
  RunLists lists;

  DeviceRuns(int64_t count, int64_t capacity)
      : totals(count), first(count * (capacity + 1)), before(count * (capacity + 1)) {
    lists.totals = totals.get();
    lists.first = first.get();
    lists.before = before.get();
    lists.capacity = capacity;
  }
  // `fault` of every list.
  explicit DeviceRuns(const std::vector<std::vector<SlotRun>>& all, int64_t capacity,
                      std::vector<uint32_t> faults = {})
      : DeviceRuns(static_cast<int64_t>(all.size()), capacity) {
    faults.resize(all.size());
    const auto stride = static_cast<size_t>(capacity) + 1;
    std::vector<uint32_t> host_first(all.size() * stride), host_before(all.size() * stride);
    std::vector<RunTotals> host_totals;
    for (size_t list = 0; list < all.size(); ++list) {
      uint32_t total = 0, runs = 0;
      for (const SlotRun& run : all[list]) {
        host_first[list * stride + runs] = run.first;
        host_before[list * stride + runs++] = total;
        total += run.length;
      }
      host_before[list * stride + runs] = total;
      host_totals.push_back({runs, total, faults[list], 0});
    }
    const auto copy = [](auto* to, const auto& from) {
      EXPECT_EQ(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
                cudaSuccess);
    };
    copy(totals.get(), host_totals);
    copy(first.get(), host_first);
    copy(before.get(), host_before);
  }

  // The kernels' lists, checked: ascending, disjoint, neighbours merged, sums right.
  std::vector<std::vector<SlotRun>> host() const {
    const auto host_totals = totals.host();
    const auto host_first = first.host(), host_before = before.host();
    const size_t stride = static_cast<size_t>(lists.capacity) + 1;
    std::vector<std::vector<SlotRun>> all(host_totals.size());
    for (size_t list = 0; list < all.size(); ++list) {
      const uint32_t* sums = host_before.data() + list * stride;
      const uint32_t runs = host_totals[list].runs;
      uint32_t end = 0;
      EXPECT_LE(runs, lists.capacity);
      EXPECT_EQ(sums[0], 0u);
      for (uint32_t i = 0; i < runs && i < stride - 1; ++i) {
        const uint32_t begin = host_first[list * stride + i];
        EXPECT_TRUE(i == 0 ? begin >= end : begin > end) << "list " << list << " run " << i;
        EXPECT_GT(sums[i + 1], sums[i]) << "list " << list << " run " << i;
        all[list].push_back({begin, sums[i + 1] - sums[i]});
        end = begin + sums[i + 1] - sums[i];
      }
      EXPECT_EQ(host_totals[list].keys, sums[runs]);
    }
    return all;
  }
};

inline int multiprocessors() {
  int count = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  return count;
}

class OnHopper : public ::testing::Test {
 protected:
  void SetUp() override {
    SQZ_SKIP_WITHOUT_GPU();
    if (!have_hopper()) GTEST_SKIP() << "no device of compute capability 9.0";
  }
};

}  // namespace sqz::cuda::test
