// Keys and values in an engine's own memory, and the upload.
#include <string>

#include "tests/libruntime/cuda/blocks.h"
#include "tests/libruntime/cuda/cached_rows.h"

namespace sqz::cuda {
namespace {

using test::DeviceArray;
using test::DeviceCall;
using testing::make_queries;
using testing::serve;
using testing::Served;
using testing::TinyIndexOptions;

TinyIndexOptions shape() {
  TinyIndexOptions o;
  o.layers = 2;
  o.kv_heads = 2;
  o.query_heads = 8;
  o.head_dim = 64;
  o.tokens = 3001;
  o.sink = 5;
  o.tail = 60;
  o.clusters = {30, 150};
  o.dense_layers = {1};
  return o;
}

SelectionRequest selection() {
  static const double thresholds[] = {1e-4, 1e-4};
  SelectionRequest request;
  request.thresholds = thresholds;
  return request;
}

class CacheTest : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

// Of selectors that look at no query, the one that does not read the sink.
SelectionRequest window() {
  SelectionRequest request;
  request.selector = SelectorKind::kWindow;
  request.keep = 0.2;
  return request;
}

void check_single_tokens(const SelectionRequest& request) {
  const Served served = serve(shape());
  const auto own = test::gpu_session(served, request);
  const auto without = test::gpu_session(served, request, 0, false);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const auto queries = make_queries(served, 0, 3, 3);
    DeviceCall expected(served, layer, 3, DType::kF32);
    expected.set_queries(queries);
    ASSERT_TRUE(own->attend(expected.call).ok());
    for (const int64_t page_size : {0, 16, 64, 256}) {
      SCOPED_TRACE(concat("layer ", layer, ", pages of ", page_size));
      const test::CachedRows rows(served, layer, page_size);
      DeviceCall call(served, layer, 3, DType::kF32);
      call.set_queries(queries);
      ASSERT_EQ(without->attend(call.call).code(), Code::kUnsupported);
      call.call.cache = &rows.cache;
      ASSERT_TRUE(without->attend(call.call).ok());
      // The same keys in the same order: the same bits.
      EXPECT_EQ(call.output(), expected.output());
    }
  }
}

TEST_F(CacheTest, GivesWhatTheIndexGives) {
  check_single_tokens(selection());
  check_single_tokens(window());
}

// Requests that share their reading of the keys: of a list of at most 64 query rows, of one of more
// and of several lists.
TEST_F(CacheTest, ManyRequestsShareIt) {
  if (!test::have_hopper()) GTEST_SKIP() << "no device of compute capability 9.0";
  for (const int64_t dim : {64, 96, 128, 256}) {
    TinyIndexOptions o = shape();
    o.head_dim = dim;
    const Served served = serve(o);
    for (const SelectionRequest& request :
         {selection(), test::with_thresholds({1e-4}), test::by_budget(0.1)}) {
      const auto own = test::gpu_session(served, request);
      const auto without = test::gpu_session(served, request, 0, false);
      for (const int64_t requests : {7, 16, 32, 50}) {
        const auto queries = make_queries(served, 0, requests, 3);
        DeviceCall expected(served, 0, requests, DType::kBF16);
        DeviceCall call(served, 0, requests, DType::kBF16);
        expected.set_queries(queries);
        call.set_queries(queries);
        ASSERT_TRUE(own->attend(expected.call).ok());
        for (const int64_t page_size : {0, 16, 256}) {
          SCOPED_TRACE(concat("d ", dim, ", ", requests, " requests, pages of ", page_size));
          const test::CachedRows rows(served, 0, page_size);
          call.call.cache = &rows.cache;
          for (const auto& session : {&without, &own}) {
            ASSERT_TRUE((*session)->attend(call.call).ok());
            ASSERT_STREQ((*session)->route(), "batch");
            // The same keys in the same order: the same bits.
            ASSERT_EQ(call.output(), expected.output());
          }
        }
      }
    }
  }
}

void check_prompts(const SelectionRequest& request) {
  const Served served = serve(shape());
  const int64_t tokens = 70;
  SessionOptions options;
  options.selection = request;
  options.block = 32;
  const auto own = create_session(served.index, test::uploaded(served), options);
  const auto without = create_session(served.index, test::uploaded(served, false), options);
  ASSERT_TRUE(own.ok() && without.ok());
  const std::vector<int64_t> indptr = {0, 30, 31, tokens};
  for (int64_t layer = 0; layer < 2; ++layer) {
    const auto queries = make_queries(served, layer, tokens, 3);
    DeviceCall expected(served, layer, tokens, DType::kBF16);
    DeviceCall call(served, layer, tokens, DType::kBF16);
    for (DeviceCall* each : {&expected, &call}) {
      each->set_queries(queries);
      each->call.indptr = indptr.data();
      each->call.requests = 3;
    }
    ASSERT_TRUE((*own)->attend(expected.call).ok());
    for (const int64_t page_size : {0, 64}) {
      SCOPED_TRACE(concat("layer ", layer, ", pages of ", page_size));
      const test::CachedRows rows(served, layer, page_size);
      call.call.cache = &rows.cache;
      const Status status = (*without)->attend(call.call);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(call.output(), expected.output());
      // Keys in two places: other kernels.
      ASSERT_TRUE((*own)->attend(call.call).ok());
      test::expect_rows_close(call.output(), expected.output(), served.options.head_dim);
    }
  }
}

// Requests of several tokens: the cache's rows are brought into the order of the index first.
TEST_F(CacheTest, PromptsToo) {
  if (!test::have_hopper()) GTEST_SKIP() << "no device of compute capability 9.0";
  check_prompts(selection());
  check_prompts(window());
}

// Without prompts a session needs less memory, and says no to them.
TEST_F(CacheTest, OneTokenARequestTakesLess) {
  const Served served = serve(shape());
  const auto index = test::uploaded(served);
  size_t used[2] = {}, total = 0;
  for (const int64_t most : {0, 1}) {
    SessionOptions options;
    options.selection = selection();
    options.max_request_tokens = most;
    size_t before = 0, after = 0;
    ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
    const auto session = create_session(served.index, index, options);
    ASSERT_TRUE(session.ok());
    ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
    used[most] = before - after;
    EXPECT_EQ((*session)->max_request_tokens(), most == 0 ? 4096 : 1);
    DeviceCall call(served, 0, 2, DType::kBF16);
    call.set_queries(make_queries(served, 0, 2, 3));
    EXPECT_TRUE((*session)->attend(call.call).ok());  // one token a request
    call.call.indptr = nullptr;
    call.call.requests = 0;
    const Status prompt = (*session)->attend(call.call);
    EXPECT_EQ(prompt.ok(), most == 0) << prompt.message();
  }
  EXPECT_LT(used[1], used[0]);
}

TEST_F(CacheTest, HostileBlockTableIsReadAsPageZero) {
  const Served served = serve(shape());
  const auto session = test::gpu_session(served, selection(), 0, false);
  const int64_t heads = served.options.kv_heads, d = served.options.head_dim;
  auto keys = test::paged(test::by_token(served, 0, false), heads, served.options.tokens, d, 64);
  const auto values =
      test::paged(test::by_token(served, 0, true), heads, served.options.tokens, d, 64);
  const DeviceArray<uint16_t> device_keys(keys.rows), device_values(values.rows);
  std::vector<int32_t> zeros = keys.table, hostile = keys.table;
  for (size_t i = 0; i < hostile.size(); i += 2) {
    zeros[i] = 0;
    hostile[i] = i % 4 == 0 ? -1 : static_cast<int32_t>(keys.pages);
  }
  // Page 0 was unused: NaN so far.
  const DeviceArray<int32_t> zero_table(zeros), hostile_table(hostile);
  ASSERT_EQ(cudaMemset(device_keys.get(), 0, static_cast<size_t>(64 * heads * d * 2)), cudaSuccess);
  ASSERT_EQ(cudaMemset(device_values.get(), 0, static_cast<size_t>(64 * heads * d * 2)),
            cudaSuccess);
  EngineCache cache = {.keys = device_keys.get(),
                       .values = device_values.get(),
                       .token_stride = heads * d,
                       .head_stride = d,
                       .page_stride = 64 * heads * d,
                       .page_size = 64,
                       .pages = keys.pages};
  for (const int64_t requests : {1, 8}) {
    DeviceCall expected(served, 0, requests, DType::kBF16),
        found(served, 0, requests, DType::kBF16);
    for (DeviceCall* call : {&expected, &found}) {
      cache.block_table = call == &expected ? zero_table.get() : hostile_table.get();
      call->set_queries(make_queries(served, 0, requests, 3));
      call->call.cache = &cache;
      ASSERT_TRUE(session->attend(call->call).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    EXPECT_EQ(found.output(), expected.output());
    EXPECT_TRUE(std::isfinite(found.output().lse[0]));
  }
}

TEST_F(CacheTest, UploadInTheBackground) {
  const Served served = serve(shape());
  auto index = upload_index(served.index, {.device = 0, .threads = 3, .wait = false});
  ASSERT_TRUE(index.ok()) << index.status().message();
  SessionOptions options;
  options.selection = selection();
  const auto session = create_session(served.index, *index, options);
  ASSERT_TRUE(session.ok());
  const auto cpu = test::cpu_session(served, selection());
  const auto queries = make_queries(served, 0, 1, 3);
  DeviceCall call(served, 1, 1, DType::kF32);
  call.set_queries(queries);
  ASSERT_TRUE((*session)->attend(call.call).ok());
  test::expect_close(call.output(), *testing::attend(*cpu, 1, queries), 64);
}

TEST_F(CacheTest, NothingIsLeftAllocated) {
  const Served served = serve(shape());
  size_t before = 0, after = 0, total = 0;
  { const auto warm = test::gpu_session(served, selection()); }
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int i = 0; i < 20; ++i) {
    const auto session = test::gpu_session(served, selection());
    ASSERT_NE(session, nullptr);
  }
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  // An index and a session have more than 4 MiB; the driver may keep some of its own.
  EXPECT_GE(after + (size_t{16} << 20), before);
}

TEST_F(CacheTest, WhatIsMissingIsSaid) {
  const Served served = serve(shape());
  // Every key is scored, so that they must be there.
  const double threshold = 1e-3;
  SessionOptions options;
  options.selection.selector = SelectorKind::kIdeal;
  options.selection.thresholds = &threshold;
  const auto ideal = create_session(served.index, test::uploaded(served, false), options);
  EXPECT_EQ(ideal.status().code(), Code::kUnsupported);
  EXPECT_NE(ideal.status().message().find("no keys"), std::string::npos);
  options.selection = selection();
  const auto missing = create_session(served.index, nullptr, options);
  EXPECT_EQ(missing.status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace sqz::cuda
