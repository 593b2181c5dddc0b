// What engines need of the C ABI (tests/libruntime/engine_test.cc) on a GPU, beside the same calls
// on the CPU: strides of lse, sessions and no context a request, ranks of KV heads, prepared calls.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sqz/sqz.hpp"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tests/libindex/cuda/device.h"
#include "tests/libruntime/random_data.h"

namespace sqz {
namespace {

using cuda::test::DeviceArray;
using runtime::make;

constexpr int64_t kDim = 64, kGroup = 2, kHeads = 4;  // KV heads

testing::TinyIndexOptions shape() {
  testing::TinyIndexOptions o;
  o.layers = 2;
  o.kv_heads = kHeads;
  o.query_heads = kHeads * kGroup;
  o.head_dim = kDim;
  o.tokens = 6000;
  o.sink = 16;
  o.tail = 100;
  o.clusters = {50, 300};
  o.heavy_hitters = true;
  o.key_calibration = true;
  return o;
}

sqz_session_options held_budget(double budget, bool on_gpu) {
  auto options = runtime::options_for_budget(budget);
  options.rule = SQZ_RULE_BUDGET;
  options.device_type = on_gpu ? 2 : 1;
  return options;
}

// Tokens in memory of the CPU or the GPU, lse as [heads, tokens]: a call and what it returns.
class Tokens {
 public:
  Tokens(const std::vector<float>& q, int64_t query_heads, bool on_gpu)
      : tokens_(std::ssize(q) / query_heads / kDim),
        shape_{tokens_, query_heads, kDim},
        strides_{1, tokens_},
        q_(q),
        out_(q.size()),
        lse_(q.size() / kDim),
        device_q_(q),
        device_out_(q.size()),
        device_lse_(q.size() / kDim) {
    q_tensor_ = tensor(on_gpu ? device_q_.get() : q_.data(), 3, on_gpu);
    out_tensor_ = tensor(on_gpu ? device_out_.get() : out_.data(), 3, on_gpu);
    lse_tensor_ = tensor(on_gpu ? device_lse_.get() : lse_.data(), 2, on_gpu);
    lse_tensor_.strides = strides_;
    args = make<sqz_attend_args>();
    args.q = &q_tensor_;
    args.out = &out_tensor_;
    args.lse = &lse_tensor_;
  }
  Tokens(const Tokens&) = delete;

  void expect_like(const Tokens& cpu) const {
    const std::vector<float> out = device_out_.host(), lse = device_lse_.host();
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(cpu.lse_[i])) {
        ASSERT_EQ(lse[i], cpu.lse_[i]) << i;
      } else {
        ASSERT_NEAR(lse[i], cpu.lse_[i], 1e-3) << i;
      }
    }
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], cpu.out_[i], 6e-3) << i;
  }
  std::vector<float> gpu_out() const { return device_out_.host(); }
  std::vector<float> gpu_lse() const { return device_lse_.host(); }

  sqz_attend_args args;

 private:
  sqz_tensor tensor(float* data, int32_t dims, bool on_gpu) {
    sqz_tensor tensor = runtime::f32_tensor(data, shape_, dims);
    tensor.device_type = on_gpu ? 2 : 1;
    return tensor;
  }

  int64_t tokens_, shape_[3], strides_[2];
  std::vector<float> q_, out_, lse_;
  DeviceArray<float> device_q_, device_out_, device_lse_;
  sqz_tensor q_tensor_, out_tensor_, lse_tensor_;
};

std::vector<float> queries(int64_t tokens, int64_t query_heads, uint64_t seed = 3) {
  return testing::Random(seed).normals(tokens * query_heads * kDim);
}

class CudaEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    SQZ_SKIP_WITHOUT_GPU();
    write("a", shape());
  }
  void write(const char* name, const testing::TinyIndexOptions& options) {
    const auto written = testing::write_tiny_index(path(name), options);
    ASSERT_TRUE(written.ok()) << written.status().message();
  }
  std::string path(const char* name) const { return directory_.file(name); }

  testing::TemporaryDirectory directory_;
};

TEST_F(CudaEngine, RequestsOfSeveralIndexesAndOfNone) {
  testing::TinyIndexOptions options = shape();
  options.seed = 2;
  ASSERT_NO_FATAL_FAILURE(write("b", options));
  runtime::Index a(path("a")), b(path("b"));
  a.upload();
  b.upload();
  for (const int64_t longest : {1, 30}) {
    std::vector<int64_t> indptr = {0};
    for (const int64_t tokens : {longest, int64_t{1}, longest, longest, int64_t{2}}) {
      indptr.push_back(indptr.back() + std::min(tokens, longest));
    }
    const std::vector<float> q = queries(indptr.back(), kHeads * kGroup);
    const Tokens* of_cpu = nullptr;
    std::vector<std::unique_ptr<Tokens>> calls;
    for (const bool on_gpu : {false, true}) {
      runtime::Session first(a, held_budget(0.2, on_gpu)), second(b, held_budget(0.3, on_gpu));
      sqz_session* sessions[] = {first.handle(), nullptr, second.handle(), second.handle(),
                                 first.handle()};
      calls.push_back(std::make_unique<Tokens>(q, kHeads * kGroup, on_gpu));
      calls.back()->args.indptr = indptr.data();
      calls.back()->args.requests = 5;
      calls.back()->args.sessions = sessions;
      ASSERT_EQ(sqz_attend(nullptr, &calls.back()->args), SQZ_OK) << sqz_last_error();
      if (on_gpu) calls.back()->expect_like(*of_cpu);
      of_cpu = calls.front().get();
    }
  }
}

TEST_F(CudaEngine, RanksOfKvHeads) {
  testing::TinyIndexOptions pages = shape();
  pages.clusters = {};
  pages.page_size = 16;
  pages.key_calibration = pages.heavy_hitters = false;
  ASSERT_NO_FATAL_FAILURE(write("pages", pages));
  struct Case {
    const char* index;
    sqz_selector selector;
    int32_t rule, residual;
  };
  for (const Case& c :
       {Case{"a", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_BUDGET, 0},
        Case{"a", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_BUDGET, SQZ_RESIDUAL_ESTIMATE},
        Case{"a", SQZ_SELECTOR_DENSE, 0, 0}, Case{"a", SQZ_SELECTOR_H2O, 0, 0},
        Case{"a", SQZ_SELECTOR_STREAM, 0, 0}, Case{"a", SQZ_SELECTOR_IDEAL, SQZ_RULE_BUDGET, 0},
        Case{"pages", SQZ_SELECTOR_QUEST, 0, 0}}) {
    SCOPED_TRACE(sqz_selector_name(c.selector));
    runtime::Index index(path(c.index));
    auto upload = make<sqz_upload_options>();
    upload.first_kv_head = 1;
    upload.kv_heads = 2;
    ASSERT_EQ(sqz_index_upload(index.handle(), &upload), SQZ_OK) << sqz_last_error();
    for (const int64_t tokens : {1, 40}) {
      auto options = held_budget(c.selector == SQZ_SELECTOR_DENSE ? 0 : 0.3, false);
      options.selector = c.selector;
      options.rule = c.rule;
      options.residual = c.residual;
      options.dense_layers = -1;
      options.first_kv_head = 1;
      options.kv_heads = 2;
      const std::vector<float> q = queries(tokens, 2 * kGroup);
      Tokens cpu(q, 2 * kGroup, false), gpu(q, 2 * kGroup, true);
      runtime::Session on_cpu(index, options);
      cpu.args.layer = gpu.args.layer = 1;
      on_cpu.attend(cpu.args);
      options.device_type = 2;
      runtime::Session on_gpu(index, options);
      on_gpu.attend(gpu.args);
      ASSERT_NO_FATAL_FAILURE(gpu.expect_like(cpu)) << tokens;
      EXPECT_EQ(on_gpu.stats().bytes_read, on_cpu.stats().bytes_read);
      options.first_kv_head = options.kv_heads = 0;  // what was uploaded
      runtime::Session again(index, options);
      options.first_kv_head = 2;
      sqz_session* session = nullptr;
      EXPECT_EQ(sqz_session_create(index.handle(), &options, &session), SQZ_INVALID_ARGUMENT);
      EXPECT_NE(std::strstr(sqz_last_error(), "uploaded"), nullptr) << sqz_last_error();
    }
  }
}

TEST_F(CudaEngine, PreparedCallsAreCaptured) {
  runtime::Index index(path("a"));
  index.upload();
  runtime::Session on_gpu(index, held_budget(0.2, true)), on_cpu(index, held_budget(0.2, false));
  const std::vector<float> q = queries(1, kHeads * kGroup);
  Tokens gpu(q, kHeads * kGroup, true), cpu(q, kHeads * kGroup, false);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  gpu.args.stream = stream;
  sqz_call* call = nullptr;
  ASSERT_EQ(sqz_call_create(on_gpu.handle(), &gpu.args, &call), SQZ_OK) << sqz_last_error();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(sqz_call_run(call, 0), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(sqz_call_run(call, 1), SQZ_OK) << sqz_last_error();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  sqz_call_destroy(call);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  cpu.args.layer = 1;  // the last one of the graph
  on_cpu.attend(cpu.args);
  gpu.expect_like(cpu);
  EXPECT_EQ(on_gpu.stats().selections, 4u);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(CudaEngine, TensorsThatKernelsCannotReadAreRefused) {
  runtime::Index index(path("a"));
  index.upload();
  runtime::Session session(index, held_budget(0.2, true));
  Tokens gpu(queries(2, kHeads * kGroup), kHeads * kGroup, true);
  sqz_tensor shifted = *gpu.args.q;
  shifted.byte_offset = 4;
  gpu.args.q = &shifted;
  EXPECT_EQ(sqz_attend(session.handle(), &gpu.args), SQZ_INVALID_ARGUMENT);
  EXPECT_THAT(sqz_last_error(), ::testing::HasSubstr("expected a multiple of 16"));
}

TEST_F(CudaEngine, NoRequestNeedsAContext) {
  sqz_session* none[] = {nullptr};
  Tokens gpu(queries(3, 4), 4, true);
  gpu.args.sessions = none;
  ASSERT_EQ(sqz_attend(nullptr, &gpu.args), SQZ_OK) << sqz_last_error();
  EXPECT_EQ(gpu.gpu_out(), std::vector<float>(3 * 4 * kDim, 0.0f));
  EXPECT_EQ(gpu.gpu_lse(), std::vector<float>(3 * 4, -INFINITY));
}

TEST_F(CudaEngine, MergesStatesWhoseLseIsHeadsByTokens) {
  runtime::Index index(path("a"));
  index.upload();
  runtime::Session session(index, held_budget(0.2, true));
  const std::vector<float> q = queries(5, kHeads * kGroup);
  Tokens a(q, kHeads * kGroup, true), b(q, kHeads * kGroup, true);
  session.attend(a.args);
  session.attend(b.args);
  ASSERT_EQ(sqz_merge_states(a.args.out, a.args.lse, b.args.out, b.args.lse), SQZ_OK);
  const std::vector<float> twice = a.gpu_lse(), once = b.gpu_lse();
  for (size_t i = 0; i < once.size(); ++i) ASSERT_NEAR(twice[i], once[i] + std::log(2.0f), 1e-5f);
}

}  // namespace
}  // namespace sqz
