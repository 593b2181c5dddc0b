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

// keys: [Hkv, N, d] after RoPE at positions 0 .. N - 1; tokens first .. first + count - 1 are put
// into buckets. Does not depend on what other tokens there are.
Result<BucketOrder> order_by_bucket(const QmodelFile& qmodel, int64_t layer,
                                    std::span<const float> keys, int64_t tokens, int64_t first,
                                    int64_t count, int threads);

}  // namespace sqz
