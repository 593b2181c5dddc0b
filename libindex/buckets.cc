#include "libindex/buckets.h"

#include <algorithm>
#include <numeric>

#include "formats/base/parallel.h"
#include "libindex/nearest.h"
#include "libruntime/rope.h"

namespace sqz {
namespace {

constexpr int64_t kBlock = 240;  // keys that are sought at once

float as_stored(float x, DType dtype) {
  return dtype == DType::kBF16 ? to_float(to_bfloat16(x)) : to_float(to_float16(x));
}

}  // namespace

Result<BucketOrder> order_by_bucket(const QmodelFile& qmodel, int64_t layer, const BucketKeys& from,
                                    int threads) {
  const int64_t count = from.count, first = from.first;
  const int64_t heads = qmodel.model.kv_heads, dim = qmodel.model.head_dim,
                buckets = qmodel.buckets;
  const std::vector<float>& centroids = qmodel.layers[static_cast<size_t>(layer)].centroids;
  const RopeUndo rope(qmodel.model.rope, dim);
  BucketOrder out;
  out.heads.resize(static_cast<size_t>(heads));
  out.offsets.assign(static_cast<size_t>(heads * (buckets + 1)), 0);
  SQZ_RETURN_IF_ERROR(parallel_for(heads, threads, [&](int64_t head) {
    const NearestCentroids nearest(centroids.data() + head * buckets * dim, buckets, dim);
    std::vector<float> angles(static_cast<size_t>(dim)), stored(angles.size());
    std::vector<float> keys(static_cast<size_t>(kBlock * dim)), products(kBlock);
    std::vector<int64_t> bucket(static_cast<size_t>(count));
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, count);
      for (int64_t i = begin; i < end; ++i) {
        const float* row = from.keys.data() + (head * from.tokens + first + i) * dim;
        std::transform(row, row + dim, stored.data(),
                       [&](float x) { return as_stored(x, from.dtype); });
        rope.apply(first + i, stored.data(), 1, angles.data(), keys.data() + (i - begin) * dim);
      }
      nearest.find(keys.data(), end - begin, products.data(), bucket.data() + begin);
    }
    uint32_t* offsets = out.offsets.data() + head * (buckets + 1);
    for (const int64_t b : bucket) ++offsets[b + 1];
    std::partial_sum(offsets, offsets + buckets + 1, offsets);
    std::vector<uint32_t> next(offsets, offsets + buckets);
    std::vector<uint32_t>& slots = out.heads[head].keys;
    slots.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) slots[next[bucket[i]]++] = static_cast<uint32_t>(i);
    return Status();
  }));
  return out;
}

}  // namespace sqz
