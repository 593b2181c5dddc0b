// One layer on its way into the file: rows in slot order and means of clusters, in the stored
// dtype. The buffers are reused from layer to layer.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "formats/sqz_writer.h"
#include "libindex/buckets.h"
#include "libindex/order.h"

namespace sqz {

// kNumeric where an element of [heads, N, d] is NaN, infinite or beyond `dtype`: the first such, by
// head and token. `head_name` ("KV head") and `what` ("key") are for the message.
Status check_storable(std::span<const float> data, int64_t heads, int64_t dim, DType dtype,
                      int64_t layer, const char* head_name, const char* what, int threads);

// The tensors of one layer as the file has them, in its dtype.
struct LayerBuffers {
  struct Level {
    std::vector<std::byte> centroids, value_means;  // [Hkv, n_k, d]
    std::vector<uint32_t> offsets;                  // [Hkv, n_k + 1]
  };
  std::vector<Level> levels;                        // coarse to fine
  std::vector<uint32_t> positions;                  // [Hkv, M]
  std::vector<uint32_t> heavy;                      // [Hkv, M] slots; empty without an order
  std::vector<std::byte> keys, values;              // [Hkv, M, d]; empty if not kept
  std::vector<std::byte> exact_keys, exact_values;  // [Hkv, E, d]

  // clusters: n_k; none for a layer without clusters. Memory is kept, contents are undefined.
  void resize(int64_t heads, int64_t dim, std::span<const int64_t> clusters, int64_t slots,
              int64_t exact);
};

class LayerStore {
 public:
  LayerStore(int64_t kv_heads, int64_t tokens, int64_t dim, DType dtype)
      : kv_heads_(kv_heads), tokens_(tokens), dim_(dim), dtype_(dtype) {}

  // A clustered layer. keys, values: [Hkv, N, d]; orders: one a head, over tokens sink .. sink + M.
  Status fill_sparse(const float* keys, const float* values, std::span<const SlotOrder> orders,
                     int64_t sink, int threads);
  // A layer of pages: tokens sink .. sink + slots in token order, and the range of each page's
  // keys.
  Status fill_pages(const float* keys, const float* values, int64_t sink, int64_t slots,
                    int64_t page_size, int threads);
  // A layer of buckets, with the classifier of `layer`, which is borrowed.
  Status fill_buckets(const float* keys, const float* values, const BucketOrder& order,
                      const QmodelLayer& layer, int64_t sink, int threads);
  // A dense layer: tokens first .. N - 1.
  Status fill_dense(const float* keys, const float* values, int64_t first, int threads);

  // After a layer's fill: its slots by attention, most first, of equal ones the earlier token
  // first. attention: [Hkv, N], what each token got.
  void order_heavy(std::span<const float> attention);

  // Sets the pointers of a view with the layer's sizes; they are valid until the next fill.
  void point(LayerView& view) const;
  // The memory that they point to: an engine that makes the tensors itself writes them here.
  LayerBuffers& buffers() { return buffers_; }

 private:
  void store_pages(const float* keys, int64_t slots, int64_t page_size, int64_t head);
  void store_means(const float* values, const SlotOrder& order, int64_t head);

  int64_t kv_heads_, tokens_, dim_;
  DType dtype_;
  LayerBuffers buffers_;
  std::vector<std::byte> page_min_, page_max_;  // [Hkv, P, d]
  std::vector<uint32_t> bucket_offsets_;        // [Hkv, C + 1]
  const QmodelLayer* classifier_ = nullptr;
};

}  // namespace sqz
