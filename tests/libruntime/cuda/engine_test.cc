// Engines' needs of the C ABI (tests/libruntime/engine_test.cc) on a GPU, beside the same calls
// on the CPU: strides of lse, sessions and no context a request, ranks of KV heads, captured calls.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>

#include "tests/common/temporary_directory.h"
#include "tests/libruntime/cuda/tokens.h"

namespace sqz {
namespace {

using cuda::test::held_budget;
using cuda::test::kDim;
using cuda::test::kGroup;
using cuda::test::kHeads;
using cuda::test::queries;
using cuda::test::shape;
using cuda::test::Tokens;
using runtime::make;

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
      auto held = held_budget(0.2, on_gpu);
      held.max_contexts = 2;
      runtime::Session session(a, held);
      session.put(1, b);
      const sqz_context none = {-1, 0, 0}, first = {0, 0, 0}, second = {1, 0, 0},
                        behind = {1, 2, 6000};
      const sqz_context contexts[] = {first, behind, none,  none,  second,
                                      none,  second, first, first, none};
      calls.push_back(std::make_unique<Tokens>(q, kHeads * kGroup, on_gpu));
      calls.back()->args.indptr = indptr.data();
      calls.back()->args.requests = 5;
      calls.back()->args.contexts = contexts;
      calls.back()->args.contexts_each = 2;
      session.attend(calls.back()->args);
      if (on_gpu) calls.back()->expect_like(*of_cpu);
      of_cpu = calls.front().get();
    }
  }
}

TEST_F(CudaEngine, ManyRequestsLeaveSinksOut) {
  runtime::Index a(path("a"));
  a.upload();
  constexpr int64_t kRequests = 24, kAll = kHeads * kGroup;
  const std::vector<float> q = queries(kRequests, kAll);
  const std::vector<sqz_context> contexts(kRequests, {0, 11, 0});
  std::vector<int64_t> indptr(kRequests + 1);
  std::iota(indptr.begin(), indptr.end(), 0);
  Tokens cpu(q, kAll, false, DType::kBF16), gpu(q, kAll, true, DType::kBF16);
  for (Tokens* call : {&cpu, &gpu}) {
    auto options = held_budget(0.2, call == &gpu);
    options.max_contexts = 2;
    runtime::Session session(a, options);
    call->args.indptr = indptr.data();
    call->args.requests = kRequests;
    call->args.contexts = contexts.data();
    session.attend(call->args);
  }
  gpu.expect_like(cpu);
}

TEST_F(CudaEngine, RanksOfKvHeads) {
  testing::TinyIndexOptions pages = shape();
  pages.clusters = {};
  pages.page_size = 16;
  pages.heavy_hitters = false;
  ASSERT_NO_FATAL_FAILURE(write("pages", pages));
  struct Case {
    const char* index;
    sqz_selector selector;
    int32_t rule;
  };
  for (const Case& c : {Case{"a", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_BUDGET},
                        Case{"a", SQZ_SELECTOR_SQUEEZED, SQZ_RULE_THRESHOLD},
                        Case{"a", SQZ_SELECTOR_DENSE, 0}, Case{"a", SQZ_SELECTOR_H2O, 0},
                        Case{"a", SQZ_SELECTOR_STREAM, 0}, Case{"pages", SQZ_SELECTOR_QUEST, 0}}) {
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

TEST_F(CudaEngine, CallsAreCaptured) {
  runtime::Index index(path("a"));
  index.upload();
  runtime::Session on_gpu(index, held_budget(0.2, true)), on_cpu(index, held_budget(0.2, false));
  const std::vector<float> q = queries(1, kHeads * kGroup);
  Tokens gpu(q, kHeads * kGroup, true), cpu(q, kHeads * kGroup, false);
  const cuda::test::Captured graph([&](cudaStream_t stream) {
    gpu.args.stream = stream;
    for (gpu.args.layer = 0; gpu.args.layer < 2; ++gpu.args.layer) {
      EXPECT_EQ(sqz_attend(on_gpu.handle(), &gpu.args), SQZ_OK) << sqz_last_error();
    }
  });
  for (int i = 0; i < 2; ++i) graph.replay();
  cpu.args.layer = 1;  // the last one of the graph
  on_cpu.attend(cpu.args);
  gpu.expect_like(cpu);
  EXPECT_EQ(on_gpu.stats().selections, 4u);
}

// Calls whose requests name their contexts in device memory, captured once.
class CudaDeviceContexts : public CudaEngine {
 protected:
  using Rows = std::vector<std::vector<sqz_context>>;
  static constexpr int64_t kEach = 2, kAll = kHeads * kGroup;
  int64_t requests_ = 24;

  void SetUp() override {
    CudaEngine::SetUp();
    if (IsSkipped()) return;
    testing::TinyIndexOptions options = shape();
    for (const char* name : {"b", "c", "short", "d"}) {
      ++options.seed;
      options.dense_layers = name[0] == 'c' ? std::set<int64_t>{0} : std::set<int64_t>{};
      if (name[0] == 's') options.tokens = 1000;  // too short for a budget: it is read whole
      if (name[0] == 'd') {
        options.tokens = 3000;
        options.clusters = {20, 130};
      }
      ASSERT_NO_FATAL_FAILURE(write(name, options));
    }
  }
  // Requests beyond `rows` have no context.
  std::vector<sqz_context> flat(const Rows& rows, bool turned) const {
    std::vector<sqz_context> out(requests_ * kEach, {-1, 0, 0});
    for (size_t r = 0; r < rows.size(); ++r) {
      std::copy(rows[r].begin(), rows[r].end(), out.begin() + static_cast<int64_t>(r) * kEach);
    }
    for (sqz_context& context : out) context.offset *= turned ? 1 : 0;
    return out;
  }
  // Every request with one of these.
  Rows in_turn(const Rows& rows) const {
    Rows out;
    const auto requests = static_cast<size_t>(requests_);
    for (size_t r = 0; r < requests; ++r) out.push_back(rows[r * 7 % rows.size()]);
    return out;
  }
  void serves_what_is_named(sqz_session_options options, DType dtype);
};

// Rows share a reading if queries are of the index's element type, and are served one by one else.
void CudaDeviceContexts::serves_what_is_named(sqz_session_options options, DType dtype) {
  SCOPED_TRACE(dtype_name(dtype));
  runtime::Index a(path("a")), b(path("b")), c(path("c")), brief(path("short")), d(path("d"));
  for (runtime::Index* index : {&a, &b, &c, &brief, &d}) index->upload();
  options.max_contexts = kEach;
  options.device_type = 1;
  runtime::Session on_cpu(a, options);
  options.device_type = 2;
  options.device_requests = requests_;
  runtime::Session on_gpu(a, options);
  const std::vector<float> q = queries(requests_, kAll);
  cuda::test::DeviceArray<sqz_context> contexts(requests_ * kEach);
  std::vector<int64_t> indptr(requests_ + 1);
  std::iota(indptr.begin(), indptr.end(), 0);
  // Turned queries are rounded to their type, so that near the threshold others may be selected.
  const bool turned = dtype == DType::kF32 || options.selector == SQZ_SELECTOR_DENSE;
  std::vector<std::unique_ptr<Tokens>> gpu, cpu;
  for (const int64_t layer : {0, 1}) {
    for (const bool here : {false, true}) {
      auto& calls = here ? gpu : cpu;
      calls.push_back(std::make_unique<Tokens>(q, kAll, here, dtype));
      sqz_attend_args& args = calls.back()->args;
      args.layer = layer;
      args.contexts_each = kEach;
      if (here) {
        args.device_contexts = contexts.get();
        continue;
      }
      args.indptr = indptr.data();
      args.requests = requests_;
    }
  }
  const cuda::test::Captured graph([&](cudaStream_t stream) {
    for (const auto& call : gpu) {
      call->args.stream = stream;
      EXPECT_EQ(sqz_attend(on_gpu.handle(), &call->args), SQZ_OK) << sqz_last_error();
    }
  });
  const auto replay = [&](const Rows& rows) {
    const std::vector<sqz_context> here = flat(rows, turned);
    ASSERT_EQ(cudaMemcpy(contexts.get(), here.data(), here.size() * sizeof(sqz_context),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    for (const auto& call : gpu) call->clear();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    graph.replay();
  };
  const auto expect = [&](const Rows& rows) {
    ASSERT_NO_FATAL_FAILURE(replay(rows));
    const std::vector<sqz_context> here = flat(rows, turned);
    for (size_t l = 0; l < cpu.size(); ++l) {
      SCOPED_TRACE(l);
      cpu[l]->args.contexts = here.data();
      on_cpu.attend(cpu[l]->args);
      ASSERT_NO_FATAL_FAILURE(gpu[l]->expect_like(*cpu[l]));
    }
  };
  const sqz_context first = {0, 0, 0}, second = {1, 0, 0}, third = {7, 0, 0}, behind = {1, 2, 6000};
  for (runtime::Session* session : {&on_cpu, &on_gpu}) {
    session->put(1, b);
    session->put(7, brief);
    session->put(2, d);
  }
  expect({{first}});
  expect(in_turn({{first}}));
  expect(in_turn({{first}, {second}, {}, {third}, {second}}));
  expect(in_turn({{first, behind}, {}, {second}, {first}, {third, {0, 2, 1000}}}));
  expect(in_turn({{{0, 16, -300}}, {{1, 3, 1 << 20}, first}}));
  const sqz_context smaller = {2, 0, 0};
  expect(in_turn({{first, {0, 0, 40}}}));  // more of a context than a list has room for
  expect(in_turn({{second}, {smaller, second}, {second, third}, {second}, {first, second}}));
  Rows many(static_cast<size_t>(requests_ - 3), {smaller});
  many[5] = {third};
  many[6] = many[7] = {first};
  many[9] = many[10] = {};
  many[11] = {{2, 4, 10}, first};
  expect(many);
  EXPECT_EQ(on_gpu.stats(-1, 7).selections, on_cpu.stats(-1, 7).selections);
  for (const int64_t slot : {1, 2}) {
    EXPECT_EQ(on_gpu.stats(-1, slot).keys_read, on_cpu.stats(-1, slot).keys_read) << slot;
  }
  on_gpu.empty(1);
  // No slot, an empty one, too many tokens that are left out: NaN, beside a request that is served.
  ASSERT_NO_FATAL_FAILURE(replay({{second}, {first}, {{3, 0, 0}}, {{0, 17, 0}}, {{-2, 0, 0}}}));
  const std::vector<float> lse = gpu[1]->gpu_lse();
  for (const int64_t request : {0, 1, 2, 3, 4, 5}) {
    const float of_request = lse[static_cast<size_t>(request)];
    if (request == 1) {
      EXPECT_TRUE(std::isfinite(of_request));
    } else if (request == 5) {
      EXPECT_EQ(of_request, -INFINITY);
    } else {
      EXPECT_TRUE(std::isnan(of_request)) << request;
    }
  }
  for (runtime::Session* session : {&on_cpu, &on_gpu}) {
    session->put(1, c);
    session->put(0, b);
  }
  expect(in_turn({{first}, {second}, {}, {second, {0, 2, 6000}}}));
}

TEST_F(CudaDeviceContexts, BudgetServesWhatIsNamed) {
  for (const int64_t requests : {24, 16}) {  // of 16 with two contexts few of one are served alone
    SCOPED_TRACE(requests);
    requests_ = requests;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      ASSERT_NO_FATAL_FAILURE(serves_what_is_named(held_budget(0.2, true), dtype));
    }
  }
}
TEST_F(CudaDeviceContexts, ThresholdServesWhatIsNamed) {
  auto options = held_budget(0, true);
  options.rule = SQZ_RULE_THRESHOLD;
  constexpr double kThresholds[] = {1.2e-4, 2.5e-4};  // of about a fifth of the keys
  options.thresholds = kThresholds;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ASSERT_NO_FATAL_FAILURE(serves_what_is_named(options, dtype));
  }
}
TEST_F(CudaDeviceContexts, DenseServesWhatIsNamed) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ASSERT_NO_FATAL_FAILURE(serves_what_is_named(runtime::dense_options(), dtype));
  }
}

TEST_F(CudaDeviceContexts, WhatCannotBeServedIsRefused) {
  runtime::Index a(path("a"));
  testing::TinyIndexOptions larger = shape();
  larger.tokens = 12000;
  larger.clusters = {50, 700};
  ASSERT_NO_FATAL_FAILURE(write("larger", larger));
  runtime::Index b(path("larger"));
  a.upload();
  b.upload();
  auto options = held_budget(0.2, true);
  options.device_requests = 4;
  runtime::Session session(a, options);
  EXPECT_EQ(sqz_session_put(session.handle(), 1, b.handle()), SQZ_UNSUPPORTED);
  EXPECT_THAT(sqz_last_error(), ::testing::HasSubstr("options.device_tokens"));
  options.device_tokens = 14000;
  runtime::Session wider(a, options);
  wider.put(1, b);
  Tokens five(queries(5, kAll), kAll, true);
  cuda::test::DeviceArray<sqz_context> contexts(std::vector<sqz_context>(5, {0, 0, 0}));
  five.args.device_contexts = contexts.get();
  EXPECT_EQ(sqz_attend(session.handle(), &five.args), SQZ_INVALID_ARGUMENT);
  EXPECT_THAT(sqz_last_error(), ::testing::HasSubstr("found 5 tokens with device_contexts"));
  options.device_requests = 0;
  runtime::Session without(a, options);
  EXPECT_EQ(sqz_attend(without.handle(), &five.args), SQZ_INVALID_ARGUMENT);
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
  const sqz_context none = {-1, 0, 0};
  runtime::Index index(path("a"));
  index.upload();
  runtime::Session session(index, held_budget(0.2, true));
  Tokens gpu(queries(3, kHeads * kGroup), kHeads * kGroup, true);
  gpu.args.contexts = &none;
  session.attend(gpu.args);
  EXPECT_EQ(gpu.gpu_out(), std::vector<float>(3 * kHeads * kGroup * kDim, 0.0f));
  EXPECT_EQ(gpu.gpu_lse(), std::vector<float>(3 * kHeads * kGroup, -INFINITY));
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
