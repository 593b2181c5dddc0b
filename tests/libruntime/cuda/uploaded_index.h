// What a GPU has of an index of codes, for the CPU backend and for float64.
#pragma once

#include "libruntime/cuda/device_index.h"
#include "tests/libruntime/coded_rows.h"
#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda::test {

using testing::Served;

struct UploadedIndex : ServedIndex {
  std::shared_ptr<const ServedIndex> from;  // offsets are there
  std::shared_ptr<DeviceIndex> on_gpu;
  std::vector<std::vector<std::byte>> memory;

  CodedRows back(const CodedRows& rows, const LayerView& view) {
    const auto count = static_cast<size_t>(view.kv_heads * view.slots);
    const auto copy = [&](const void* data, size_t bytes) {
      std::vector<std::byte>& to = memory.emplace_back(bytes);
      EXPECT_EQ(cudaMemcpy(to.data(), data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      return to.data();
    };
    EXPECT_EQ(rows.bits, 8);
    return {.bits = 8,
            .codes = copy(rows.codes, count * static_cast<size_t>(view.head_dim)),
            .scales = copy(rows.scales, count * 2)};
  }
};

inline std::shared_ptr<UploadedIndex> as_uploaded(const Served& served) {
  auto out = std::make_shared<UploadedIndex>();
  static_cast<ServedIndex&>(*out) = *served.index;
  out->from = served.index;
  out->on_gpu = uploaded(served);
  out->of_range = served.index->metadata();
  out->of_range->key_codes = 0;
  for (int64_t l = 0; l < std::ssize(out->layers); ++l) {
    LayerView& view = out->layers[static_cast<size_t>(l)];
    const DeviceLayer& layer = out->on_gpu->layer(l);
    view.key_codes = {};
    if (view.coded_keys.bits == 0) continue;
    view.coded_keys = out->back(layer.coded_keys, view);
    view.coded_values = out->back(layer.coded_values, view);
  }
  return out;
}

}  // namespace sqz::cuda::test
