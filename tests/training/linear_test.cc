#include "training/linear.h"

#include <gtest/gtest.h>

namespace sqz::training {
namespace {

// Rows on both sides of where another way of multiplying begins, and a width that no vector
// divides.
TEST(Linear, EqualsFloat64OfTheStoredWeights) {
  const at::Generator generator = at::detail::createCPUGenerator(7);
  constexpr int64_t kIn = 203, kOut = 131;
  for (const at::ScalarType stored : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool bias : {false, true}) {
      const Linear linear = {at::randn({kOut, kIn}, generator).to(stored),
                             bias ? at::randn({kOut}, generator) : at::Tensor()};
      const at::Tensor weight = linear.weight.to(at::kDouble).t();
      for (const int64_t rows : {1, 3, 8, 9, 64, 65}) {
        const at::Tensor x = at::randn({rows, kIn}, generator);
        at::Tensor expected = at::mm(x.to(at::kDouble), weight);
        if (bias) expected.add_(linear.bias);
        const at::Tensor off = (apply(linear, x).to(at::kDouble) - expected).abs().max();
        EXPECT_LT(off.item<double>(), 1e-4) << rows << " rows, weights of " << at::toString(stored);
      }
    }
  }
}

// The product of a row does not depend on the rows beside it.
TEST(Linear, ARowIsThatOfItself) {
  const at::Generator generator = at::detail::createCPUGenerator(8);
  const Linear linear = {at::randn({96, 64}, generator).to(at::kBFloat16), {}};
  const at::Tensor x = at::randn({21, 64}, generator), together = apply(linear, x);
  for (int64_t row = 0; row < x.size(0); ++row) {
    EXPECT_TRUE(apply(linear, x.narrow(0, row, 1)).equal(together.narrow(0, row, 1))) << row;
  }
}

}  // namespace
}  // namespace sqz::training
