// Merging of states, through the C ABI: parts of a set of keys give the whole.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "sqz/sqz.hpp"
#include "tests/libruntime/random_data.h"
#include "tests/libruntime/reference.h"

namespace sqz {
namespace {

// Two states in one dtype.
class Pair {
 public:
  // lse is [heads, tokens] if `turned`.
  Pair(DType dtype, int64_t tokens, int64_t heads, int64_t dim, bool turned = false)
      : out_shape_{tokens, heads, dim},
        lse_shape_{tokens, heads},
        lse_strides_{turned ? 1 : heads, turned ? tokens : 1} {
    for (int i = 0; i < 2; ++i) {
      out[i].assign(tokens * heads * dim * dtype_size(dtype), std::byte{0});
      lse[i].assign(tokens * heads, -INFINITY);
      out_tensor[i] = runtime::f32_tensor(nullptr, out_shape_, 3);
      out_tensor[i].data = out[i].data();
      out_tensor[i].dtype_bits = static_cast<uint8_t>(8 * dtype_size(dtype));
      out_tensor[i].dtype_code = dtype == DType::kBF16 ? 4 : 2;
      lse_tensor[i] = runtime::f32_tensor(lse[i].data(), lse_shape_, 2);
      lse_tensor[i].strides = lse_strides_;
    }
  }
  float& lse_of(int i, int64_t row) {
    const int64_t heads = lse_shape_[1];
    return lse[i][row / heads * lse_strides_[0] + row % heads * lse_strides_[1]];
  }
  sqz_status merge() {
    return sqz_merge_states(&out_tensor[0], &lse_tensor[0], &out_tensor[1], &lse_tensor[1]);
  }

  std::vector<std::byte> out[2];
  std::vector<float> lse[2];
  sqz_tensor out_tensor[2], lse_tensor[2];

 private:
  int64_t out_shape_[3], lse_shape_[2], lse_strides_[2];
};

TEST(MergeStates, DisjointPartsGiveTheWhole) {
  constexpr int64_t kRows = 6, kDim = 80, kKeys = 300;
  testing::Random random(3);
  const auto q = random.normals(kRows * kDim);
  const auto keys = testing::stored(DType::kBF16, random.normals(kKeys * kDim));
  const auto values = testing::stored(DType::kBF16, random.normals(kKeys * kDim));
  LayerView view;
  view.head_dim = kDim;
  const auto state_of = [&](int64_t row, int64_t first, int64_t last) {
    reference::Attention attention(q.data() + row * kDim, view, 0.3);
    for (int64_t j = first; j < last; ++j) attention.add(keys.data(), values.data(), j);
    return attention.state();
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const double tolerance = dtype == DType::kF32 ? 1e-6 : dtype == DType::kF16 ? 2e-3 : 2e-2;
    for (const int64_t cut : {0, 1, 77, 300}) {  // 0 and 300: one side has no keys
      Pair pair(dtype, kRows / 2, 2, kDim, cut == 77);
      for (int64_t row = 0; row < kRows; ++row) {
        const reference::State parts[] = {state_of(row, 0, cut), state_of(row, cut, kKeys)};
        for (int i = 0; i < 2; ++i) {
          pair.lse_of(i, row) = static_cast<float>(parts[i].lse);
          const auto bytes =
              testing::stored(dtype, std::vector<float>(parts[i].out.begin(), parts[i].out.end()));
          std::copy(bytes.begin(), bytes.end(), pair.out[i].begin() + row * std::ssize(bytes));
        }
      }
      ASSERT_EQ(pair.merge(), SQZ_OK) << sqz_last_error();
      for (int64_t row = 0; row < kRows; ++row) {
        const reference::State whole = state_of(row, 0, kKeys);
        EXPECT_NEAR(pair.lse_of(0, row), whole.lse, 1e-5);
        for (int64_t c = 0; c < kDim; ++c) {
          ASSERT_NEAR(reference::element(dtype, pair.out[0].data(), row * kDim + c), whole.out[c],
                      tolerance);
        }
      }
    }
  }
}

TEST(MergeStates, SidesWithoutKeysCountNothing) {
  Pair both(DType::kF32, 1, 1, 4);
  ASSERT_EQ(both.merge(), SQZ_OK);
  EXPECT_EQ(both.lse[0][0], -INFINITY);
  EXPECT_EQ(reference::element(DType::kF32, both.out[0].data(), 2), 0.0);
  // The contents of an empty side do not matter, not even if they are NaN.
  for (const int empty : {0, 1}) {
    Pair pair(DType::kF32, 1, 1, 4);
    auto* nothing = reinterpret_cast<float*>(pair.out[empty].data());
    auto* full = reinterpret_cast<float*>(pair.out[1 - empty].data());
    for (int i = 0; i < 4; ++i) {
      nothing[i] = NAN;
      full[i] = static_cast<float>(i);
    }
    pair.lse[1 - empty][0] = 5.0f;
    ASSERT_EQ(pair.merge(), SQZ_OK);
    EXPECT_EQ(pair.lse[0][0], 5.0f);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(reference::element(DType::kF32, pair.out[0].data(), i), i);
    }
  }
}

// One more key, whose value is 0: tests/python has that of rows with keys.
TEST(MergeStates, SinksOfSidesWithoutKeys) {
  float sinks[] = {-INFINITY, 0.5f};
  int64_t shape[] = {2};
  sqz_tensor tensor = runtime::f32_tensor(sinks, shape, 1);
  Pair pair(DType::kF32, 2, 2, 1);  // the first token has no keys, the second those of one side
  for (const int64_t row : {2, 3}) {
    pair.lse_of(0, row) = 0.5f;
    reinterpret_cast<float*>(pair.out[0].data())[row] = 6;
  }
  const auto merge = [&] {
    return sqz_merge_states_with(&pair.out_tensor[0], &pair.lse_tensor[0], &pair.out_tensor[1],
                                 &pair.lse_tensor[1], &tensor, nullptr);
  };
  ASSERT_EQ(merge(), SQZ_OK) << sqz_last_error();
  const float lse[] = {-INFINITY, 0.5f, 0.5f, 0.5f + std::log(2.0f)}, out[] = {0, 0, 6, 3};
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_FLOAT_EQ(pair.lse_of(0, row), lse[row]) << row;
    EXPECT_EQ(reference::element(DType::kF32, pair.out[0].data(), row), out[row]) << row;
  }
  shape[0] = 3;
  EXPECT_EQ(merge(), SQZ_INVALID_ARGUMENT);
}

TEST(MergeStates, FarApartDoesNotOverflow) {
  Pair pair(DType::kF32, 1, 1, 1);
  reinterpret_cast<float*>(pair.out[0].data())[0] = 1;
  reinterpret_cast<float*>(pair.out[1].data())[0] = 2;
  pair.lse[0][0] = -9000;
  pair.lse[1][0] = 9000;
  ASSERT_EQ(pair.merge(), SQZ_OK);
  EXPECT_EQ(reference::element(DType::kF32, pair.out[0].data(), 0), 2.0);
  EXPECT_EQ(pair.lse[0][0], 9000.0f);
  for (const int side : {0, 1}) {
    reinterpret_cast<float*>(pair.out[side].data())[0] = 3e38f;
    pair.lse[side][0] = 0;
  }
  ASSERT_EQ(pair.merge(), SQZ_OK);
  EXPECT_NEAR(reference::element(DType::kF32, pair.out[0].data(), 0), 3e38, 1e33);
}

TEST(MergeStates, RowsThatAreNoStateBecomeNan) {
  for (const float bad : {NAN, INFINITY}) {
    for (const int side : {0, 1}) {
      Pair pair(DType::kF32, 2, 1, 4);
      pair.lse[side][1] = bad;
      pair.lse[0][0] = pair.lse[1][0] = 1;
      ASSERT_EQ(pair.merge(), SQZ_OK);
      EXPECT_TRUE(std::isnan(pair.lse[0][1]));
      EXPECT_NEAR(pair.lse[0][0], 1 + std::log(2), 1e-6);
      for (int64_t i = 0; i < 8; ++i) {
        EXPECT_EQ(std::isnan(reference::element(DType::kF32, pair.out[0].data(), i)), i >= 4);
      }
    }
  }
}

TEST(MergeStates, RefusesWhatIsNoState) {
  Pair pair(DType::kF32, 2, 1, 4), half(DType::kF16, 2, 1, 4), longer(DType::kF32, 3, 1, 4);
  const auto merge = [](sqz_tensor* a, sqz_tensor* la, sqz_tensor* b, sqz_tensor* lb) {
    return sqz_merge_states(a, la, b, lb);
  };
  auto* out = pair.out_tensor;
  auto* lse = pair.lse_tensor;
  EXPECT_EQ(merge(nullptr, &lse[0], &out[1], &lse[1]), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(merge(&out[0], nullptr, &out[1], &lse[1]), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(merge(&out[0], &lse[0], nullptr, &lse[1]), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(merge(&out[0], &lse[0], &out[1], nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(merge(&out[0], &lse[0], &half.out_tensor[1], &lse[1]), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(merge(&out[0], &lse[0], &longer.out_tensor[1], &lse[1]), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(merge(&out[0], &lse[0], &out[1], &longer.lse_tensor[1]), SQZ_INVALID_ARGUMENT);
  const std::pair<sqz_tensor*, sqz_tensor*> same[] = {
      {&out[0], &lse[0]}, {&out[0], &lse[1]}, {&out[1], &lse[0]}};
  for (const auto& [of, with] : same) {
    void* const apart = std::exchange(with->data, of->data);
    EXPECT_EQ(merge(&out[0], &lse[0], &out[1], &lse[1]), SQZ_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(sqz_last_error(), "in the same memory"), nullptr) << sqz_last_error();
    with->data = apart;
  }
  EXPECT_EQ(sqz_merge_states_on(&out[0], &lse[0], &out[1], &lse[1], &pair), SQZ_INVALID_ARGUMENT);
  EXPECT_STREQ(sqz_last_error(), "stream: found a stream, expected null on the CPU");
  out[1].device_type = 2;
  EXPECT_EQ(merge(&out[0], &lse[0], &out[1], &lse[1]), SQZ_UNSUPPORTED);
  // All four on a GPU that is not there.
  out[0].device_type = lse[0].device_type = lse[1].device_type = 2;
  for (sqz_tensor* tensor : {&out[0], &out[1], &lse[0], &lse[1]}) tensor->device_id = 1000;
  EXPECT_EQ(merge(&out[0], &lse[0], &out[1], &lse[1]), SQZ_UNSUPPORTED);
  EXPECT_EQ(std::strncmp(sqz_last_error(), "device_type 2 (CUDA): ", 22), 0) << sqz_last_error();
}

}  // namespace
}  // namespace sqz
