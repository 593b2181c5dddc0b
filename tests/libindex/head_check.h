// One KV head of a stored layer against its definition, in float64: every key once, rows, means of
// clusters, the order of slots.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "libindex/order.h"
#include "tests/libruntime/reference.h"

namespace sqz::test {

using reference::element;

inline double rounded(float x, DType dtype) {
  return dtype == DType::kF16 ? to_float(to_float16(x)) : to_float(to_bfloat16(x));
}

class HeadCheck {
 public:
  // keys, values: [Hkv, tokens, d], what means are of.
  HeadCheck(const LayerView& view, std::span<const float> keys, std::span<const float> values,
            int64_t tokens, int64_t sink, int64_t head)
      : view_(view), keys_(keys), values_(values), tokens_(tokens), sink_(sink), head_(head) {
    for (int k = 0; k < view.levels; ++k) {
      const uint32_t* begin = view.level[k].offsets + head * (view.level[k].clusters + 1);
      offsets_.emplace_back(begin, begin + view.level[k].clusters + 1);
    }
  }

  void all() const {
    SCOPED_TRACE(concat("head ", head_));
    nesting();
    rows();
    means();
    chain();
  }

 private:
  size_t at(int64_t token, int64_t c) const {
    return static_cast<size_t>((head_ * tokens_ + token) * view_.head_dim + c);
  }
  uint32_t position(int64_t slot) const { return view_.positions[head_ * view_.slots + slot]; }

  void nesting() const {
    std::vector<uint32_t> sorted;
    for (int64_t s = 0; s < view_.slots; ++s) sorted.push_back(position(s));
    for (size_t k = 0; k < offsets_.size(); ++k) {
      const bool finest = k + 1 == offsets_.size();
      EXPECT_EQ(offsets_[k].front(), 0u);
      EXPECT_EQ(offsets_[k].back(), finest ? view_.slots : view_.level[k + 1].clusters);
      for (size_t i = 1; i < offsets_[k].size(); ++i) {
        ASSERT_LT(offsets_[k][i - 1], offsets_[k][i]) << "level " << k << " cluster " << i - 1;
        EXPECT_TRUE(!finest || std::is_sorted(sorted.begin() + offsets_[k][i - 1],
                                              sorted.begin() + offsets_[k][i]));
      }
    }
    std::sort(sorted.begin(), sorted.end());
    std::vector<uint32_t> all(sorted.size());
    std::iota(all.begin(), all.end(), static_cast<uint32_t>(sink_));
    EXPECT_EQ(sorted, all);
  }

  void expect_row(const void* keys, const void* values, int64_t row, int64_t token) const {
    for (int64_t c = 0; c < view_.head_dim; ++c) {
      const int64_t i = row * view_.head_dim + c;
      ASSERT_EQ(element(view_.dtype, keys, i), rounded(keys_[at(token, c)], view_.dtype));
      ASSERT_EQ(element(view_.dtype, values, i), rounded(values_[at(token, c)], view_.dtype));
    }
  }

  void rows() const {
    for (int64_t s = 0; s < view_.slots; ++s) {
      expect_row(view_.keys, view_.values, head_ * view_.slots + s, position(s));
    }
    for (int64_t e = 0; e < view_.exact; ++e) {
      const int64_t token = e < sink_ ? e : tokens_ - view_.exact + e;
      expect_row(view_.exact_keys, view_.exact_values, head_ * view_.exact + e, token);
    }
  }

  void means() const {
    const auto slots = first_slots(offsets_);
    const double step = view_.dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;  // half a unit + sums
    for (size_t k = 0; k < slots.size(); ++k) {
      const LevelView& level = view_.level[k];
      for (size_t i = 0; i + 1 < slots[k].size(); ++i) {
        for (int64_t c = 0; c < view_.head_dim; ++c) {
          const double size = slots[k][i + 1] - slots[k][i];
          double key = 0, value = 0;
          for (uint32_t s = slots[k][i]; s < slots[k][i + 1]; ++s) {
            key += keys_[at(position(s), c)] / size;
            value += values_[at(position(s), c)] / size;
          }
          const int64_t place = (head_ * level.clusters + static_cast<int64_t>(i)) * view_.head_dim;
          ASSERT_NEAR(element(view_.dtype, level.centroids, place + c), key,
                      std::abs(key) * step + 1e-5)
              << "level " << k << " cluster " << i;
          ASSERT_NEAR(element(view_.dtype, level.value_means, place + c), value,
                      std::abs(value) * step + 1e-5);
        }
      }
    }
  }

  double cosine(size_t k, int64_t a, int64_t b) const {
    double ab = 0, aa = 0, bb = 0;
    const int64_t base = head_ * view_.level[k].clusters;
    for (int64_t c = 0; c < view_.head_dim; ++c) {
      const void* means = view_.level[k].centroids;
      const double x = element(view_.dtype, means, (base + a) * view_.head_dim + c);
      const double y = element(view_.dtype, means, (base + b) * view_.head_dim + c);
      ab += x * y;
      aa += x * x;
      bb += y * y;
    }
    return ab / std::sqrt(aa * bb);
  }

  // Among siblings, the next cluster is the most similar to the last of those that are left.
  void chain() const {
    for (size_t k = 0; k < offsets_.size(); ++k) {
      const std::vector<uint32_t> whole = {0, static_cast<uint32_t>(view_.level[k].clusters)};
      const std::vector<uint32_t>& groups = k == 0 ? whole : offsets_[k - 1];
      for (size_t g = 0; g + 1 < groups.size(); ++g) {
        for (uint32_t i = std::max(groups[g], 1u); i < groups[g + 1]; ++i) {
          const double taken = cosine(k, i - 1, i);
          for (uint32_t other = i + 1; other < groups[g + 1]; ++other) {
            // Means that are stored differ a little from those that were compared.
            ASSERT_LE(cosine(k, i - 1, other), taken + 0.01) << "level " << k << " place " << i;
          }
        }
      }
    }
  }

  const LayerView& view_;
  const std::span<const float> keys_, values_;
  const int64_t tokens_, sink_, head_;
  std::vector<std::vector<uint32_t>> offsets_;
};

}  // namespace sqz::test
