// States merged on the GPU against the CPU's merge.
#include "libruntime/attention/attend.h"
#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda {
namespace {

using test::DeviceArray;

class Merge : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

std::vector<float> numbers(size_t count, uint64_t seed) {
  std::vector<float> out(count);
  for (float& x : out) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(seed >> 40) / (1 << 23) - 1;
  }
  return out;
}

TEST_F(Merge, AsTheCpuDoes) {
  constexpr int64_t kRows = 77;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t dim : {64, 96, 128, 256}) {
      SCOPED_TRACE(concat(dtype_name(dtype), ", dim ", dim));
      std::vector<std::byte> out_a = testing::stored(dtype, numbers(kRows * dim, 1));
      const std::vector<std::byte> out_b = testing::stored(dtype, numbers(kRows * dim, 2));
      std::vector<float> lse_a = numbers(kRows, 3), lse_b = numbers(kRows, 4);
      for (int64_t r = 0; r < kRows; ++r) {
        lse_a[static_cast<size_t>(r)] *= 20;
        if (r % 7 == 1) lse_a[static_cast<size_t>(r)] = -INFINITY;
        if (r % 5 == 1) lse_b[static_cast<size_t>(r)] = -INFINITY;
      }
      const DeviceArray<std::byte> a(out_a), b(out_b);
      const DeviceArray<float> la(lse_a), lb(lse_b);
      ASSERT_TRUE(
          merge_states(0, dtype, kRows, dim, a.get(), la.get(), b.get(), lb.get(), {}, nullptr)
              .ok());
      merge_rows(dtype, kRows, dim, out_a.data(), lse_a.data(), out_b.data(), lse_b.data());
      const std::vector<std::byte> found = a.host();
      const std::vector<float> found_lse = la.host();
      const double step = dtype == DType::kF32 ? 1e-6 : dtype == DType::kF16 ? 1e-3 : 8e-3;
      for (int64_t i = 0; i < kRows * dim; ++i) {
        ASSERT_NEAR(reference::element(dtype, found.data(), i),
                    reference::element(dtype, out_a.data(), i), step)
            << i;
      }
      for (size_t r = 0; r < lse_a.size(); ++r) {
        if (std::isinf(lse_a[r])) {
          EXPECT_EQ(found_lse[r], lse_a[r]);
        } else {
          EXPECT_NEAR(found_lse[r], lse_a[r], 1e-5);
        }
      }
    }
  }
}

// One logit a query head with a weight and no value: out *= sigmoid(lse - sink).
TEST_F(Merge, SinksCountOnce) {
  constexpr int64_t kTokens = 9, kHeads = 3, kRows = kTokens * kHeads, kDim = 80;
  const std::vector<float> out_a = numbers(kRows * kDim, 1), out_b = numbers(kRows * kDim, 2);
  std::vector<float> lse_a = numbers(kRows, 3), lse_b = numbers(kRows, 4);
  lse_a[4] = lse_b[4] = lse_a[6] = lse_b[8] = -INFINITY;
  const std::vector<float> sinks = {0.5f, -INFINITY, -2};
  for (const bool turned : {false, true}) {
    const DeviceArray<float> a(out_a), b(out_b), la(lse_a), lb(lse_b), s(sinks);
    const auto rows = [&](auto* data) {
      return BasicLseRows(data, kHeads, turned ? 1 : kHeads, turned ? kTokens : 1);
    };
    ASSERT_TRUE(merge_states(0, DType::kF32, kRows, kDim, a.get(), rows(la.get()), b.get(),
                             rows(lb.get()), {s.get(), kHeads}, nullptr)
                    .ok());
    const std::vector<float> found = a.host(), found_lse = la.host();
    for (int64_t r = 0; r < kRows; ++r) {
      const auto at = static_cast<size_t>(&rows(lse_a.data())[r] - lse_a.data());
      const double weight_a = std::exp(lse_a[at]), weight_b = std::exp(lse_b[at]);
      const double sum = weight_a + weight_b + std::exp(sinks[static_cast<size_t>(r % kHeads)]);
      for (int64_t c = 0; c < kDim; ++c) {
        const auto i = static_cast<size_t>(r * kDim + c);
        const double value =
            sum == 0 ? out_a[i] : (weight_a * out_a[i] + weight_b * out_b[i]) / sum;
        ASSERT_NEAR(found[i], value, 1e-6) << r;
      }
      if (sum == 0) {
        ASSERT_EQ(found_lse[at], -INFINITY);
      } else {
        ASSERT_NEAR(found_lse[at], std::log(sum), 1e-5) << r;
      }
    }
  }
}

TEST_F(Merge, AnEmptySideMayHoldAnything) {
  const DeviceArray<float> a(std::vector<float>{NAN, 2}), b(std::vector<float>{3, NAN});
  const DeviceArray<float> la(std::vector<float>{-INFINITY, 1}),
      lb(std::vector<float>{1, -INFINITY});
  ASSERT_TRUE(
      merge_states(0, DType::kF32, 2, 1, a.get(), la.get(), b.get(), lb.get(), {}, nullptr).ok());
  EXPECT_EQ(a.host(), (std::vector<float>{3, 2}));
  EXPECT_EQ(la.host(), (std::vector<float>{1, 1}));
}

TEST_F(Merge, BadRowsBecomeNan) {
  const DeviceArray<float> a(std::vector<float>{1, 1, 1}), b(std::vector<float>{2, 2, 2});
  const DeviceArray<float> la(std::vector<float>{NAN, 0, 0});
  const DeviceArray<float> lb(std::vector<float>{0, INFINITY, 0});
  ASSERT_TRUE(
      merge_states(0, DType::kF32, 3, 1, a.get(), la.get(), b.get(), lb.get(), {}, nullptr).ok());
  const std::vector<float> out = a.host(), lse = la.host();
  for (const size_t bad : {0, 1}) {
    EXPECT_TRUE(std::isnan(out[bad]));
    EXPECT_TRUE(std::isnan(lse[bad]));
  }
  EXPECT_NEAR(out[2], 1.5f, 1e-6);
}

}  // namespace
}  // namespace sqz::cuda
