// One layer on its way into the file: rows in slot order and means of clusters, in the stored
// dtype. The buffers are reused from layer to layer.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "formats/sqz_writer.h"
#include "libindex/order.h"

namespace sqz {

// kNumeric where an element of [heads, N, d] is NaN, infinite or beyond `dtype`: the first such, by
// head and token. `head_name` ("KV head") and `what` ("key") are for the message.
Status check_storable(std::span<const float> data, int64_t heads, int64_t dim, DType dtype,
                      int64_t layer, const char* head_name, const char* what, int threads);

class LayerStore {
 public:
  struct Level {
    std::vector<std::byte> centroids, value_means;  // [Hkv, n_k, d]
    std::vector<uint32_t> offsets;                  // [Hkv, n_k + 1]
  };

  LayerStore(int64_t kv_heads, int64_t tokens, int64_t dim, DType dtype)
      : kv_heads_(kv_heads), tokens_(tokens), dim_(dim), dtype_(dtype) {}

  // A clustered layer. keys, values: [Hkv, N, d]; orders: one a head, over tokens sink .. sink + M.
  Status fill_sparse(const float* keys, const float* values, std::span<const SlotOrder> orders,
                     int64_t sink, bool keep_kv, int threads);
  // A dense layer: tokens first .. N - 1.
  Status fill_dense(const float* keys, const float* values, int64_t first, int threads);

  LayerData data() const;  // borrows from this object until the next fill
  const std::vector<Level>& levels() const { return levels_; }

 private:
  void resize(int64_t slots, int64_t exact, bool keep_kv, std::span<const SlotOrder> orders);
  void store_means(const float* keys, const float* values, const SlotOrder& order, int64_t head);

  int64_t kv_heads_, tokens_, dim_;
  DType dtype_;
  std::vector<Level> levels_;
  std::vector<uint32_t> positions_;                   // [Hkv, M]
  std::vector<std::byte> keys_, values_;              // [Hkv, M, d]
  std::vector<std::byte> exact_keys_, exact_values_;  // [Hkv, E, d]
};

}  // namespace sqz
