// Sessions of both backends on one index of buckets, and what must be the same of the two.
#pragma once

#include <functional>

#include "tests/libruntime/cuda/buckets.h"
#include "tests/libruntime/cuda/graph.h"

namespace sqz::cuda::test {

using Close = void (*)(const Output& found, const Output& expected, int64_t dim);

struct BucketBackends {
  const Served& served;
  std::unique_ptr<ServingSession> gpu;
  std::unique_ptr<Session> cpu;

  BucketBackends(const Served& index, double share, int64_t block = 0) : served(index) {
    SessionOptions options;
    options.selection = keep_buckets(share);
    options.block = block;
    options.threads = 2;
    auto on_gpu = create_session(served.index, uploaded(served), options);
    auto on_cpu = Session::create(served.index, options);
    EXPECT_TRUE(on_gpu.ok()) << on_gpu.status().message();
    EXPECT_TRUE(on_cpu.ok()) << on_cpu.status().message();
    if (on_gpu.ok()) gpu = std::move(*on_gpu);
    if (on_cpu.ok()) cpu = std::move(*on_cpu);
  }

  // With the same queries: outputs, what is counted, and runs. Returns the share of the clustered
  // keys that were read.
  double compare(BucketCalls& calls, const BucketQueries& queries, Close close) {
    if (gpu == nullptr || cpu == nullptr) return 0;
    calls.set(queries);
    const Status status = gpu->attend(calls.gpu());
    EXPECT_TRUE(status.ok()) << status.message();
    const Output expected = calls.expected(*cpu);
    close(calls.output(), expected, served.options.head_dim);
    const auto found = gpu->totals(1);
    EXPECT_TRUE(found.ok()) << found.status().message();
    if (!found.ok()) return 0;
    expect_same_counters(*found, cpu->counters(1));
    EXPECT_TRUE(same_runs(runs_of(*gpu, calls.gpu()), runs_of(*cpu, calls.cpu())));
    return static_cast<double>(found->keys_read) / static_cast<double>(found->keys_possible);
  }

  // A graph of two calls, of which the second must not disturb the first, replayed with the queries
  // that it was captured with, with others, and then with the same again: the same bits. `calls`
  // are of `tokens` with `lists` selections.
  void replay(BucketCalls& calls, int64_t tokens, int64_t lists, Close close) {
    ASSERT_TRUE(gpu != nullptr && cpu != nullptr);
    calls.set(bucket_queries(served, tokens, 1));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the other stream does not wait for this one
    const CapturedCall captured(*gpu, calls.gpu(), 2);
    for (const uint64_t seed : {1, 2, 3}) {
      calls.set(bucket_queries(served, tokens, seed), captured.stream());
      captured.replay();
      close(calls.output(), calls.expected(*cpu), served.options.head_dim);
    }
    EXPECT_EQ(gpu->totals(1)->selections, static_cast<uint64_t>(3 * 2 * lists));
    const Output first = calls.output();
    for (int i = 0; i < 20; ++i) {
      captured.replay();
      ASSERT_EQ(calls.output(), first) << "the same bits again";
    }
  }

  // A NaN of a query that decides for the rows `is_lost(row)` is seen there and nowhere else; an
  // infinite query of the first block is an error where its selection is asked for.
  void lose(BucketCalls& calls, const BucketQueries& clean_queries, size_t element,
            const std::function<bool(size_t)>& is_lost) {
    ASSERT_TRUE(gpu != nullptr);
    calls.set(clean_queries);
    ASSERT_TRUE(gpu->attend(calls.gpu()).ok());
    const Output clean = calls.output();
    BucketQueries q = clean_queries;
    q.before[element] = NAN;
    calls.set(q);
    ASSERT_TRUE(gpu->attend(calls.gpu()).ok());
    const Output found = calls.output();
    for (size_t row = 0; row < found.lse.size(); ++row) {
      if (is_lost(row)) {
        ASSERT_TRUE(std::isnan(found.lse[row])) << row;
      } else {
        ASSERT_EQ(found.lse[row], clean.lse[row]) << row;
      }
    }
    q = clean_queries;
    q.before[0] = INFINITY;
    calls.set(q);
    EXPECT_EQ(gpu->select(calls.gpu()).status().code(), Code::kNumeric);
  }
};

class BucketsOnGpu : public ::testing::Test {
 protected:
  void SetUp() override { SQZ_SKIP_WITHOUT_GPU(); }
};

}  // namespace sqz::cuda::test
