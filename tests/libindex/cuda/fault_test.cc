// Builds with the engine "cuda" when CUDA fails: each call of it in turn, a GPU without memory, and
// one that is lost.
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "libindex/builder.h"
#include "libindex/kmeans.h"
#include "libindex/layer_engine.h"
#include "libindex/layer_store.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_model.h"
#include "tests/libindex/clustered_data.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/cuda/faults.h"

namespace sqz {
namespace {

using cuda::test::DeviceArray;
using cuda::test::faults::fail_each_call;

constexpr int64_t kTokens = 900, kDim = 64, kHeads = 3, kQueryHeads = 6, kTail = 20;
constexpr int64_t kLayers = 3;  // the last has a sliding window

ModelDescription make_model() {
  ModelDescription model = testing::tiny_model(kLayers, kQueryHeads, kHeads, kDim);
  model.sliding_window.back() = 128;
  return model;
}

// Builds of one text into a folder of their own, from keys on the host or on the GPU.
class Builds : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    SQZ_SKIP_WITHOUT_GPU();
    for (uint64_t h = 0; h < kHeads; ++h) {
      const auto head = test::clustered_points(kTokens, kDim, 30, 0.5f, h);
      keys_.insert(keys_.end(), head.begin(), head.end());
    }
    values_ = test::clustered_points(kHeads * kTokens, kDim, 30, 0.5f, 50);
    queries_ = test::clustered_points(kQueryHeads * kTail, kDim, 5, 1.0f, 51);
    input_ = {keys_, values_, queries_};
    if (GetParam()) {
      device_keys_.emplace(keys_);
      device_values_.emplace(values_);
      rows_ = {device_keys_->get(), device_values_->get(), DType::kF32, kTokens * kDim, 0};
      input_ = {{}, {}, queries_, &rows_};
    }
    ASSERT_EQ(message_of_build(), "");
    expected_ = take();
    ASSERT_FALSE(expected_.empty());
  }

  // "" if nothing went wrong.
  std::string message_of_build() {
    const Status status = build();
    code_ = status.code();
    return status.message();
  }
  // The file that was built, which is removed.
  std::string take() const {
    std::string bytes = testing::read_file(folder_.file("a.sqz"));
    std::filesystem::remove(folder_.file("a.sqz"));
    return bytes;
  }
  // After a build; one that failed leaves nothing, and with `again` one without faults follows it.
  void expect_one_index(bool failed, bool again = true) {
    if (failed) {
      EXPECT_THAT(folder_.names(), ::testing::IsEmpty());
      if (!again) return;
      EXPECT_EQ(message_of_build(), "");
    }
    EXPECT_TRUE(take() == expected_) << "other bytes";
    EXPECT_THAT(folder_.names(), ::testing::IsEmpty());
  }

  Status build() {
    BuildOptions options;
    options.sink = 4;
    options.tail = kTail;
    options.iterations = 2;
    options.level_fractions = {0.02, 0.1};
    options.threads = 2;
    options.engine = "cuda";
    const std::vector<int32_t> tokens(kTokens, 7);
    SQZ_ASSIGN_OR_RETURN(const auto builder,
                         IndexBuilder::create(Env::posix(), folder_.file("a.sqz"), false,
                                              make_model(), tokens, "", options));
    for (int64_t l = 0; l < kLayers; ++l) SQZ_RETURN_IF_ERROR(builder->add_layer(l, input_));
    return builder->finish().status();
  }

  testing::TemporaryDirectory folder_;
  std::vector<float> keys_, values_, queries_;
  std::optional<DeviceArray<float>> device_keys_, device_values_;
  DeviceRows rows_;
  LayerInput input_;
  std::string expected_;
  Code code_ = Code::kOk;
};

TEST_P(Builds, EachCallIsAStatus) {
  int64_t builds = 0;
  fail_each_call(
      "build", [&] { return message_of_build(); },
      [&](bool failed) { expect_one_index(failed, builds++ % 100 == 0); }, 25);
  EXPECT_EQ(message_of_build(), "");
  expect_one_index(false);
}

TEST_P(Builds, OutOfMemory) {
  cuda::test::faults::with_little_memory(
      [&] {
        const std::string message = message_of_build();
        EXPECT_TRUE(message.empty() || code_ == Code::kOutOfMemory) << message;
        return !message.empty();
      },
      [&](bool failed) { expect_one_index(failed); });
}

INSTANTIATE_TEST_SUITE_P(Keys, Builds, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "OnTheGpu" : "OnTheHost"; });

// Labels alone: what a query classifier is trained with.
TEST(CudaKmeansFaults, EachCallIsAStatus) {
  SQZ_SKIP_WITHOUT_GPU();
  const auto points = test::clustered_points(2000, kDim, 30, 0.5f, 1);
  const auto engine = make_cuda_kmeans(kDim, 0).value();
  std::vector<int32_t> labels(2000), expected;
  const auto run = [&]() -> std::string {
    labels.assign(labels.size(), -1);
    const KmeansProblem problem{points.data(), nullptr, 2000, kDim, 40, 2, 7, labels.data()};
    return engine->run({&problem, 1}, 1, {}).message();
  };
  ASSERT_EQ(run(), "");
  expected = labels;
  fail_each_call("k-means", run, [&](bool failed) {
    if (failed) {
      EXPECT_EQ(run(), "");
    }
    EXPECT_EQ(labels, expected);
  });
}

// Keys at an address that is not the GPU's: the kernel that reads them ends the context, as a GPU
// that falls off its bus does.
void lose_the_gpu() {
  alarm(120);
  const auto engine = make_cuda_kmeans(kDim, 0).value();
  const auto points = test::clustered_points(2000, kDim, 30, 0.5f, 1);
  std::vector<int32_t> labels(2000);
  const KmeansProblem problem{points.data(), nullptr, 2000, kDim, 40, 2, 7, labels.data()};
  const void* nowhere = reinterpret_cast<void*>(uintptr_t{256});
  const DeviceRows rows{nowhere, nowhere, DType::kF32, 2000 * kDim, 0};
  LayerProblem layer;
  layer.heads = 1;
  layer.tokens = 2000;
  layer.dim = kDim;
  layer.clustered = 1900;
  layer.tree = {{40}, 2, 3, 0, 2};
  layer.device = &rows;
  LayerBuffers buffers;
  const Status before = engine->run({&problem, 1}, 1, {});
  const Status lost = engine->layer_engine()->fill(layer, {}, buffers);
  const Status after = engine->run({&problem, 1}, 1, {});
  for (const Status& status : {before, lost, after}) {
    std::fprintf(stderr, "status: %s\n", status.message().c_str());
  }
  std::exit(before.ok() && !lost.ok() && !after.ok() ? 0 : 1);
}

TEST(CudaKmeansFaults, ALostGpuIsAnError) {
  SQZ_SKIP_WITHOUT_GPU();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(lose_the_gpu(), ::testing::ExitedWithCode(0), "status: ");
}

}  // namespace
}  // namespace sqz
