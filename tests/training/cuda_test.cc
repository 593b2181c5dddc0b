// The dense pass on a GPU beside the one on the CPU. Skips where LibTorch sees no GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "training/aten.h"
#include "training/runner.h"

namespace sqz {
namespace {

constexpr int64_t kTokens = 700;

struct Pass {
  std::vector<float> keys, values, queries, logits;  // of the second layer
  bool on_device = false;
};

std::vector<float> host_rows(const void* data, const DeviceRows& rows,
                             const ModelDescription& model) {
  const auto type = rows.dtype == DType::kBF16 ? at::kBFloat16 : at::kFloat;
  const at::Tensor there =
      at::from_blob(const_cast<void*>(data), {model.kv_heads, kTokens, model.head_dim},
                    {rows.head_stride, model.head_dim, 1}, at::device(at::kCUDA).dtype(type));
  const at::Tensor here = there.to(at::kCPU, at::kFloat).contiguous();
  return {here.data_ptr<float>(), here.data_ptr<float>() + here.numel()};
}

Pass run(const std::string& device, DType dtype, bool on_device) {
  RunnerOptions options;
  options.device = device;
  options.dtype = dtype;
  options.threads = 2;
  auto runner = Runner::load(SQZ_SOURCE_DIR "/examples/models/nano", options);
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  const ModelDescription& model = runner.value()->config().description;
  std::vector<int32_t> tokens(kTokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>(i * i * 31 % static_cast<size_t>(model.vocab_size));
  }
  Pass pass;
  PrefillOptions prefill;
  prefill.query_positions.resize(50);
  std::iota(prefill.query_positions.begin(), prefill.query_positions.end(), kTokens - 50);
  prefill.on_device = on_device;
  prefill.consumer = [&](const LayerCapture& layer) {
    if (layer.layer != 1) return Status();
    pass.queries.assign(layer.queries.begin(), layer.queries.end());
    pass.on_device = layer.device != nullptr;
    if (pass.on_device) {
      EXPECT_TRUE(layer.keys.empty() && layer.values.empty());
      pass.keys = host_rows(layer.device->keys, *layer.device, model);
      pass.values = host_rows(layer.device->values, *layer.device, model);
    } else {
      pass.keys.assign(layer.keys.begin(), layer.keys.end());
      pass.values.assign(layer.values.begin(), layer.values.end());
    }
    return Status();
  };
  const Status done = runner.value()->prefill(tokens, prefill);
  EXPECT_TRUE(done.ok()) << done.message();
  GenerateOptions none;
  none.max_tokens = 0;
  EXPECT_TRUE(runner.value()->generate(tokens, none, nullptr, &pass.logits).ok());
  return pass;
}

// |a - b| / |b|
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double error = 0, total = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    error += std::pow(double{a[i]} - b[i], 2);
    total += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(error / total);
}

void expect_near(const Pass& found, const Pass& expected, double limit) {
  EXPECT_LT(distance(found.keys, expected.keys), limit);
  EXPECT_LT(distance(found.values, expected.values), limit);
  EXPECT_LT(distance(found.queries, expected.queries), limit);
  EXPECT_LT(distance(found.logits, expected.logits), limit);
}

TEST(CudaRunner, LikeTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or a LibTorch without CUDA";
  const Pass cpu = run("cpu", DType::kF32, true);
  EXPECT_FALSE(cpu.on_device) << "there is no device to leave them on";
  expect_near(run("cuda", DType::kF32, false), cpu, 2e-3);
  expect_near(run("cuda", DType::kBF16, false), cpu, 5e-2);  // flash attention
}

TEST(CudaRunner, RowsOnTheDeviceAreThoseOfTheHost) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or a LibTorch without CUDA";
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Pass host = run("cuda", dtype, false), device = run("cuda", dtype, true);
    EXPECT_TRUE(device.on_device);
    EXPECT_EQ(device.keys, host.keys);
    EXPECT_EQ(device.values, host.values);
    EXPECT_EQ(device.queries, host.queries);
  }
}

}  // namespace
}  // namespace sqz
