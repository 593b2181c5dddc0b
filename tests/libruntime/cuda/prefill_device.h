// Tensors and lists of runs on the GPU for the prefill tests.
#pragma once

#include <memory>
#include <vector>

#include "formats/base/dtype.h"
#include "libruntime/kernels/cuda/prefill.h"
#include "tests/libindex/cuda/capability.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/random_data.h"

namespace sqz::cuda::test {

// Numbers as stored in BF16 or F16, here and on the GPU.
struct Tensor {
  std::vector<float> values;  // rounded
  std::unique_ptr<DeviceArray<uint16_t>> device;

  Tensor(DType dtype, int64_t count, float scale, testing::Random& random) {
    std::vector<uint16_t> bits(static_cast<size_t>(count));
    values.resize(bits.size());
    for (size_t i = 0; i < bits.size(); ++i) {
      const float value = scale * random.normal();
      if (dtype == DType::kBF16) {
        bits[i] = to_bfloat16(value).bits;
        values[i] = to_float(BFloat16{bits[i]});
      } else {
        bits[i] = to_float16(value).bits;
        values[i] = to_float(Float16{bits[i]});
      }
    }
    // A tensor of no elements still has an address.
    if (bits.empty()) bits.push_back(0);
    device = std::make_unique<DeviceArray<uint16_t>>(bits);
  }
};

struct SlotRun {
  uint32_t first, length;
};

// Lists of runs as the kernels take and leave them.
struct DeviceRuns {
  DeviceArray<uint2> runs;
  DeviceArray<uint32_t> prefix, counts, totals;
  PrefillRuns lists;

  DeviceRuns(int64_t count, int32_t stride)
      : runs(count * stride), prefix(count * stride), counts(count), totals(count) {
    lists = {runs.get(), prefix.get(), counts.get(), totals.get(), stride};
  }
  explicit DeviceRuns(const std::vector<std::vector<SlotRun>>& all, int32_t stride)
      : DeviceRuns(static_cast<int64_t>(all.size()), stride) {
    std::vector<uint2> host_runs(all.size() * stride);
    std::vector<uint32_t> host_prefix(all.size() * stride), host_counts, host_totals;
    for (size_t list = 0; list < all.size(); ++list) {
      uint32_t total = 0;
      for (size_t i = 0; i < all[list].size(); ++i) {
        host_runs[list * stride + i] = {all[list][i].first, all[list][i].length};
        host_prefix[list * stride + i] = total;
        total += all[list][i].length;
      }
      host_counts.push_back(static_cast<uint32_t>(all[list].size()));
      host_totals.push_back(total);
    }
    const auto copy = [](auto* to, const auto& from) {
      EXPECT_EQ(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
                cudaSuccess);
    };
    copy(runs.get(), host_runs);
    copy(prefix.get(), host_prefix);
    copy(counts.get(), host_counts);
    copy(totals.get(), host_totals);
  }

  // What the kernels left, checked: ascending, disjoint, neighbours merged, prefixes right.
  std::vector<std::vector<SlotRun>> host() const {
    const auto host_runs = runs.host();
    const auto host_prefix = prefix.host(), host_counts = counts.host(),
               host_totals = totals.host();
    std::vector<std::vector<SlotRun>> all(host_counts.size());
    for (size_t list = 0; list < all.size(); ++list) {
      uint32_t total = 0, end = 0;
      EXPECT_LE(host_counts[list], static_cast<uint32_t>(lists.stride));
      for (uint32_t i = 0; i < host_counts[list]; ++i) {
        const uint2 run = host_runs[list * lists.stride + i];
        EXPECT_TRUE(i == 0 ? run.x >= end : run.x > end) << "list " << list << " run " << i;
        EXPECT_GT(run.y, 0u);
        EXPECT_EQ(host_prefix[list * lists.stride + i], total) << "list " << list << " run " << i;
        total += run.y;
        end = run.x + run.y;
        all[list].push_back({run.x, run.y});
      }
      EXPECT_EQ(host_totals[list], total);
    }
    return all;
  }
};

inline int multiprocessors() {
  int count = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  return count;
}

}  // namespace sqz::cuda::test
