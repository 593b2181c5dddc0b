// Makes the tensors of one layer: rows in slot order and means of clusters, in the stored dtype.
// Layers share the buffers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "formats/sqz_writer.h"
#include "libindex/buckets.h"
#include "libindex/order.h"

namespace sqz {

// kNumeric names the first element of [heads, N, d], by head and token, that is NaN, infinite or
// beyond `dtype`. The message calls a head `head_name` ("KV head") and the element `what` ("key").
Status check_storable(std::span<const float> data, int64_t heads, int64_t dim, DType dtype,
                      int64_t layer, const char* head_name, const char* what, int threads);

// The tensors of one layer, as the file has them.
struct LayerBuffers {
  struct Level {
    std::vector<std::byte> centroids, value_means;  // [Hkv, n_k, d]
    std::vector<uint32_t> offsets;                  // [Hkv, n_k + 1]
  };
  std::vector<Level> levels;                        // coarse to fine
  std::vector<uint32_t> positions;                  // [Hkv, M]
  std::vector<uint32_t> heavy;                      // [Hkv, M] slots; empty without an order
  std::vector<std::byte> keys, values;              // [Hkv, M, d]
  std::vector<std::byte> exact_keys, exact_values;  // [Hkv, E, d]

  // clusters: n_k, or empty. value_dim 0: that of keys. Does not clear the buffers.
  void resize(int64_t heads, int64_t dim, std::span<const int64_t> clusters, int64_t slots,
              int64_t exact, int64_t value_dim = 0);
};

class LayerStore {
 public:
  LayerStore(int64_t kv_heads, int64_t tokens, int64_t dim, DType dtype)
      : kv_heads_(kv_heads), tokens_(tokens), dim_(dim), value_dim_(dim), dtype_(dtype) {}
  // The layer that is filled next: `tokens` of keys and values are given.
  void begin(const LayerGeometry& layer, int64_t tokens) {
    kv_heads_ = layer.kv_heads;
    tokens_ = tokens;
    dim_ = layer.head_dim;
    value_dim_ = layer.value_dim;
  }

  // Fills a clustered layer. keys: [Hkv, N, d], values: [Hkv, N, dv]. orders: one a head, over the
  // tokens sink to sink + M - 1.
  Status fill_sparse(const float* keys, const float* values, std::span<const SlotOrder> orders,
                     int64_t sink, int threads);
  // Fills a layer of pages: `slots` tokens from `sink` on, in token order, and the range of the
  // keys of each page.
  Status fill_pages(const float* keys, const float* values, int64_t sink, int64_t slots,
                    int64_t page_size, int threads);
  // Fills a layer of buckets. Borrows the classifier `layer`.
  Status fill_buckets(const float* keys, const float* values, const BucketOrder& order,
                      const QmodelLayer& layer, int64_t sink, int threads);
  // Fills a dense layer: the tokens first to N - 1.
  Status fill_dense(const float* keys, const float* values, int64_t first, int threads);

  // Sorts the slots of the layer that was filled by attention [Hkv, N], largest first. Among equals
  // the earlier token comes first.
  void order_heavy(std::span<const float> attention);

  // Sets the pointers of a view that has the layer's sizes. They are valid until the next fill.
  void point(LayerView& view) const;
  // The buffers that they point to, for an engine that makes the tensors itself.
  LayerBuffers& buffers() { return buffers_; }

 private:
  void store_pages(const float* keys, int64_t slots, int64_t page_size, int64_t head);
  void store_means(const float* values, const SlotOrder& order, int64_t head);

  int64_t kv_heads_, tokens_, dim_, value_dim_;
  DType dtype_;
  LayerBuffers buffers_;
  std::vector<std::byte> page_min_, page_max_;  // [Hkv, P, d]
  std::vector<uint32_t> bucket_offsets_;        // [Hkv, C + 1]
  const QmodelLayer* classifier_ = nullptr;
};

}  // namespace sqz
