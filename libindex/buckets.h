// The partition `buckets`: keys go to the buckets of a query classifier (formats/qmodel_file.h), by
// their direction before RoPE. No k-means: the buckets are the model's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/qmodel_file.h"
#include "libindex/order.h"

namespace sqz {

// One layer's keys in bucket order.
struct BucketOrder {
  std::vector<SlotOrder> heads;   // [Hkv], without offsets; a bucket's keys in token order
  std::vector<uint32_t> offsets;  // [Hkv, C + 1]: first slot of each bucket, which may be empty
};

// Keys of one layer, after RoPE at positions 0 .. N - 1, and which of them go to buckets. They are
// rounded to `dtype` first.
struct BucketKeys {
  std::span<const float> keys;  // [Hkv, N, d]
  int64_t tokens = 0;           // N
  int64_t first = 0, count = 0;
  DType dtype = DType::kBF16;  // BF16 or F16
};

Result<BucketOrder> order_by_bucket(const QmodelFile& qmodel, int64_t layer, const BucketKeys& keys,
                                    int threads);

}  // namespace sqz
