// Numbers on the GPU at the end of float32 and beyond it.
#include <gmock/gmock.h>

#include "libruntime/cuda/device_index.h"
#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

class Numbers : public test::OnGpu {};

// As on the CPU, whose errors are NaN here.
TEST_F(Numbers, BeyondFloat32) {
  const testing::Served served = testing::serve(test::shape(64, 4, {40}));
  const DType stored = served.index->metadata().dtype;
  const auto filled = [&](float x) {
    return testing::stored(stored, std::vector<float>(3 * 4321 * 64, x));
  };
  const auto ones = filled(1), huge = filled(3e38f), large = filled(1e5f);
  SessionOptions options;
  const auto attend = [&](const std::vector<std::byte>& values, float query, DType dtype) {
    ServedIndex index = *served.index;
    for (LayerView& view : index.layers) {
      view.keys = view.exact_keys = view.level[0].centroids = ones.data();
      view.values = view.exact_values = values.data();
    }
    const testing::Served changed = {served.options, std::make_shared<const ServedIndex>(index)};
    const auto session = create_session(changed.index, test::uploaded(changed), options);
    EXPECT_TRUE(session.ok()) << session.status().message();
    test::DeviceCall call(changed, 0, {1}, dtype);
    call.set_queries(std::vector<float>(3 * 4 * 64, query));
    EXPECT_TRUE((*session)->attend(call.call).ok());
    return call.output();
  };
  const auto expect_nan = [](const testing::Output& found) {
    for (const float x : found.lse) ASSERT_TRUE(std::isnan(x));
    for (const float x : found.out) ASSERT_TRUE(std::isnan(x));
  };
  for (const bool sm80 : {false, true}) {
    for (const bool dense : {true, false}) {
      SCOPED_TRACE(concat("sm80 ", sm80, ", dense ", dense));
      options.sm80_kernels = sm80;
      options.selection = test::with_thresholds({1e-9});
      if (dense) options.selection = {.selector = SelectorKind::kDense};
      for (const float query : {-3e38f, 3e38f}) expect_nan(attend(large, query, DType::kF32));
      const testing::Output low = attend(large, -2e36f, DType::kF32);
      for (const float x : low.lse) ASSERT_NEAR(x / -1.6e37, 1, 1e-2);
      for (const float x : low.out) ASSERT_NEAR(x, 1e5, 400);
      for (const float x : attend(large, 0, DType::kF16).out) ASSERT_EQ(x, 65504);
      expect_nan(attend(huge, 0, DType::kF32));
    }
  }
}

}  // namespace
}  // namespace sqz::cuda
