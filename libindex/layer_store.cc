#include "libindex/layer_store.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "formats/base/parallel.h"
#include "formats/sqz_layout.h"

namespace sqz {
namespace {

float largest(DType dtype) {
  return dtype == DType::kF16    ? 65504.0f
         : dtype == DType::kBF16 ? 0x1.fep127f
                                 : std::numeric_limits<float>::max();
}

void store_row(const float* row, int64_t dim, DType dtype, std::byte* out) {
  for (int64_t c = 0; c < dim; ++c) {
    const uint16_t bits = dtype == DType::kF16 ? to_float16(row[c]).bits : to_bfloat16(row[c]).bits;
    std::memcpy(out + 2 * c, &bits, 2);
  }
}

}  // namespace

Status check_storable(std::span<const float> data, int64_t heads, int64_t dim, DType dtype,
                      int64_t layer, const char* head_name, const char* what, int threads) {
  const int64_t per_head = static_cast<int64_t>(data.size()) / heads;
  const float limit = largest(dtype);
  return parallel_for(heads, threads, [&](int64_t head) {
    const float* x = data.data() + head * per_head;
    for (int64_t i = 0; i < per_head; ++i) {
      if (std::abs(x[i]) <= limit) continue;
      return Status(Code::kNumeric, concat("layer ", layer, ", ", head_name, " ", head, ", token ",
                                           i / dim, ": ", what, " element ", i % dim, " is ", x[i],
                                           ", expected a finite ", dtype_name(dtype), " number"));
    }
    return Status();
  });
}

void LayerBuffers::resize(int64_t heads, int64_t dim, std::span<const int64_t> clusters,
                          int64_t slots, int64_t exact, int64_t value_dim) {
  const auto rows = [&](int64_t count) { return static_cast<size_t>(heads * count * dim * 2); };
  const auto value_rows = [&](int64_t count) {
    return static_cast<size_t>(heads * count * (value_dim > 0 ? value_dim : dim) * 2);
  };
  levels.resize(clusters.size());
  for (size_t k = 0; k < levels.size(); ++k) {
    levels[k].centroids.resize(rows(clusters[k]));
    levels[k].value_means.resize(value_rows(clusters[k]));
    levels[k].offsets.resize(static_cast<size_t>(heads * (clusters[k] + 1)));
  }
  positions.resize(static_cast<size_t>(heads * slots));
  keys.resize(rows(slots));
  values.resize(value_rows(slots));
  exact_keys.resize(rows(exact));
  exact_values.resize(value_rows(exact));
}

// values: [M, dv], the clustered tokens of this head. Sums in double, in slot order, rounded once.
void LayerStore::store_means(const float* values, const SlotOrder& order, int64_t head) {
  const std::vector<std::vector<uint32_t>> slots = first_slots(order.offsets);
  std::vector<double> sum(static_cast<size_t>(value_dim_));
  std::vector<float> mean(sum.size());
  for (size_t k = 0; k < buffers_.levels.size(); ++k) {
    const auto clusters = static_cast<int64_t>(slots[k].size()) - 1;
    for (int64_t i = 0; i < clusters; ++i) {
      std::fill(sum.begin(), sum.end(), 0.0);
      for (uint32_t s = slots[k][i]; s < slots[k][i + 1]; ++s) {
        const int64_t row = int64_t{order.keys[s]} * value_dim_;
        for (int64_t c = 0; c < value_dim_; ++c) sum[c] += values[row + c];
      }
      const double size = slots[k][i + 1] - slots[k][i];
      for (size_t c = 0; c < sum.size(); ++c) mean[c] = static_cast<float>(sum[c] / size);
      const int64_t out = (head * clusters + i) * 2;
      store_row(order.means[k].data() + i * dim_, dim_, dtype_,
                buffers_.levels[k].centroids.data() + out * dim_);
      store_row(mean.data(), value_dim_, dtype_,
                buffers_.levels[k].value_means.data() + out * value_dim_);
    }
    std::copy(order.offsets[k].begin(), order.offsets[k].end(),
              buffers_.levels[k].offsets.begin() + head * (clusters + 1));
  }
}

Status LayerStore::fill_sparse(const float* keys, const float* values,
                               std::span<const SlotOrder> orders, int64_t sink, int threads) {
  const auto slots = static_cast<int64_t>(orders[0].keys.size());
  const int64_t exact = tokens_ - slots;
  std::vector<int64_t> clusters;
  for (const auto& offsets : orders[0].offsets) {
    clusters.push_back(static_cast<int64_t>(offsets.size()) - 1);
  }
  buffers_.resize(kv_heads_, dim_, clusters, slots, exact, value_dim_);
  return parallel_for(kv_heads_, threads, [&](int64_t head) {
    const float* head_keys = keys + head * tokens_ * dim_;
    const float* head_values = values + head * tokens_ * value_dim_;
    const SlotOrder& order = orders[head];
    store_means(head_values + sink * value_dim_, order, head);
    const auto store = [&](int64_t token, int64_t row, auto& to_keys, auto& to_values) {
      store_row(head_keys + token * dim_, dim_, dtype_, to_keys.data() + row * dim_ * 2);
      store_row(head_values + token * value_dim_, value_dim_, dtype_,
                to_values.data() + row * value_dim_ * 2);
    };
    for (int64_t s = 0; s < slots; ++s) {
      const int64_t token = sink + order.keys[s], row = head * slots + s;
      buffers_.positions[row] = static_cast<uint32_t>(token);
      store(token, row, buffers_.keys, buffers_.values);
    }
    for (int64_t e = 0; e < exact; ++e) {
      const int64_t token = e < sink ? e : e + slots;
      store(token, head * exact + e, buffers_.exact_keys, buffers_.exact_values);
    }
    return Status();
  });
}

// keys: [slots, d] of this head. Rounding keeps order: the range of rounded keys is the rounded
// range.
void LayerStore::store_pages(const float* keys, int64_t slots, int64_t page_size, int64_t head) {
  const int64_t pages = page_count(slots, page_size);
  std::vector<float> min(static_cast<size_t>(dim_)), max(min.size());
  for (int64_t page = 0; page < pages; ++page) {
    const float* first = keys + page * page_size * dim_;
    const float* end = keys + std::min((page + 1) * page_size, slots) * dim_;
    std::copy_n(first, dim_, min.begin());
    std::copy_n(first, dim_, max.begin());
    for (const float* key = first + dim_; key != end; key += dim_) {
      for (int64_t c = 0; c < dim_; ++c) {
        min[c] = std::min(min[c], key[c]);
        max[c] = std::max(max[c], key[c]);
      }
    }
    const int64_t out = (head * pages + page) * dim_ * 2;
    store_row(min.data(), dim_, dtype_, page_min_.data() + out);
    store_row(max.data(), dim_, dtype_, page_max_.data() + out);
  }
}

Status LayerStore::fill_pages(const float* keys, const float* values, int64_t sink, int64_t slots,
                              int64_t page_size, int threads) {
  SlotOrder in_token_order;
  in_token_order.keys.resize(static_cast<size_t>(slots));
  std::iota(in_token_order.keys.begin(), in_token_order.keys.end(), 0u);
  const std::vector<SlotOrder> orders(static_cast<size_t>(kv_heads_), in_token_order);
  SQZ_RETURN_IF_ERROR(fill_sparse(keys, values, orders, sink, threads));
  const auto bytes = static_cast<size_t>(kv_heads_ * page_count(slots, page_size) * dim_ * 2);
  page_min_.resize(bytes);
  page_max_.resize(bytes);
  return parallel_for(kv_heads_, threads, [&](int64_t head) {
    store_pages(keys + (head * tokens_ + sink) * dim_, slots, page_size, head);
    return Status();
  });
}

Status LayerStore::fill_buckets(const float* keys, const float* values, const BucketOrder& order,
                                const QmodelLayer& layer, int64_t sink, int threads) {
  bucket_offsets_ = order.offsets;
  classifier_ = &layer;
  return fill_sparse(keys, values, order.heads, sink, threads);
}

Status LayerStore::fill_dense(const float* keys, const float* values, int64_t first, int threads) {
  const int64_t exact = tokens_ - first;
  buffers_.resize(kv_heads_, dim_, {}, 0, exact, value_dim_);
  return parallel_for(kv_heads_, threads, [&](int64_t head) {
    for (int64_t e = 0; e < exact; ++e) {
      const int64_t row = head * tokens_ + first + e, out = (head * exact + e) * 2;
      store_row(keys + row * dim_, dim_, dtype_, buffers_.exact_keys.data() + out * dim_);
      store_row(values + row * value_dim_, value_dim_, dtype_,
                buffers_.exact_values.data() + out * value_dim_);
    }
    return Status();
  });
}

void LayerStore::order_heavy(std::span<const float> attention) {
  const int64_t slots = std::ssize(buffers_.positions) / kv_heads_;
  buffers_.heavy.resize(buffers_.positions.size());
  for (int64_t head = 0; head < kv_heads_; ++head) {
    const uint32_t* positions = buffers_.positions.data() + head * slots;
    const float* got = attention.data() + head * tokens_;
    const auto begin = buffers_.heavy.begin() + head * slots, end = begin + slots;
    std::iota(begin, end, 0u);
    std::sort(begin, end, [&](uint32_t a, uint32_t b) {
      const uint32_t x = positions[a], y = positions[b];
      return got[x] != got[y] ? got[x] > got[y] : x < y;
    });
  }
}

void LayerStore::point(LayerView& view) const {
  for (size_t k = 0; k < buffers_.levels.size(); ++k) {
    const LayerBuffers::Level& level = buffers_.levels[k];
    view.level[k].centroids = level.centroids.data();
    view.level[k].value_means = level.value_means.data();
    view.level[k].offsets = level.offsets.data();
  }
  view.positions = buffers_.positions.data();
  view.heavy = buffers_.heavy.data();
  view.page_min = page_min_.data();
  view.page_max = page_max_.data();
  view.bucket_offsets = bucket_offsets_.data();
  if (classifier_ != nullptr) view.classifier = view_of(*classifier_, view.classifier.hidden);
  view.keys = buffers_.keys.data();
  view.values = buffers_.values.data();
  view.exact_keys = buffers_.exact_keys.data();
  view.exact_values = buffers_.exact_values.data();
}

}  // namespace sqz
