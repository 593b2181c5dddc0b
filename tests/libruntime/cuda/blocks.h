// Calls with blocks of query tokens on the GPU, beside the same on the CPU.
#pragma once

#include <list>
#include <string>

#include "tests/libruntime/cuda/serving.h"

namespace sqz::cuda::test {

inline testing::TinyIndexOptions shape(int64_t dim, int64_t group, std::vector<int64_t> clusters) {
  testing::TinyIndexOptions o;
  o.layers = 2;
  o.kv_heads = 3;
  o.query_heads = o.kv_heads * group;
  o.head_dim = dim;
  o.tokens = 4321;
  o.sink = 16;
  o.tail = 100;
  o.clusters = std::move(clusters);
  o.seed = static_cast<uint64_t>(dim * 10 + group);
  return o;
}

inline SelectionRequest with_thresholds(const std::vector<double>& thresholds) {
  static std::list<std::vector<double>> kept;  // a request only points to them
  kept.push_back(thresholds);
  SelectionRequest request;
  request.thresholds = kept.back().data();
  request.levels = static_cast<int>(thresholds.size());
  return request;
}

inline SelectionRequest by_budget(double keep, int levels = 0) {
  SelectionRequest request;
  request.keep = keep;
  request.rule = RuleKind::kBudget;
  request.levels = levels;
  return request;
}

struct BlockOptions {
  int64_t block = 0;
  DType dtype = DType::kBF16;  // of queries and results
  bool sm80_kernels = false;
  const Served* wanted = nullptr;  // whose keys the queries look for, if not the served ones
  // Queries as bf16 has them, of which kernels that take f32 in two parts round nothing: two scores
  // within that rounding may be chosen either way.
  bool plain_queries = false;
  // With 16-bit queries the rounding of unpacked keys adds this to log-sum-exps; as many times the
  // error of everything.
  double lse_slack = 0, rounding = 1;
};

// Both backends with the same queries of requests of these lengths: results, what was read and the
// runs of the first block. Returns the part of the keys that was read.
inline double compare_blocks(const Served& served, const SelectionRequest& selection,
                             const std::vector<int64_t>& lengths, const BlockOptions& how) {
  SessionOptions options;
  options.selection = selection;
  options.block = how.block;
  options.sm80_kernels = how.sm80_kernels;
  const auto gpu = create_session(served.index, uploaded(served), options);
  options.threads = 2;
  const auto cpu = Session::create(served.index, options);
  EXPECT_TRUE(gpu.ok()) << gpu.status().message();
  EXPECT_TRUE(cpu.ok()) << cpu.status().message();
  if (!gpu.ok() || !cpu.ok()) return 0;
  std::vector<int64_t> indptr = {0};
  for (const int64_t length : lengths) indptr.push_back(indptr.back() + length);
  const int64_t tokens = indptr.back();
  const DType dtype = how.dtype;
  uint64_t read = 0, possible = 0;
  for (int64_t layer = 0; layer < served.options.layers; ++layer) {
    std::vector<float> queries =
        testing::make_queries(how.wanted == nullptr ? served : *how.wanted, layer, tokens, 7, 0.6f);
    if (how.plain_queries) {
      const auto rounded = testing::stored(DType::kBF16, queries);
      for (size_t i = 0; i < queries.size(); ++i) {
        queries[i] = static_cast<float>(
            reference::element(DType::kBF16, rounded.data(), static_cast<int64_t>(i)));
      }
    }
    DeviceCall call(served, layer, tokens, dtype);
    call.set_queries(queries);
    call.call.indptr = indptr.data();
    call.call.requests = static_cast<int64_t>(lengths.size());
    const Status status = (*gpu)->attend(call.call);
    EXPECT_TRUE(status.ok()) << status.message();
    const auto expected =
        testing::attend(**cpu, layer, queries, {.dtype = dtype, .positions = {}, .indptr = indptr});
    EXPECT_TRUE(expected.ok()) << expected.status().message();
    if (dtype == DType::kF32) {
      expect_close(call.output(), *expected, served.options.head_dim);
    } else {
      expect_rows_within(call.output(), *expected, served.options.head_dim, how.lse_slack,
                         how.rounding);
    }

    const auto found = (*gpu)->totals(layer);
    EXPECT_TRUE(found.ok());
    expect_same_counters(*found, (*cpu)->counters(layer));
    read += found->keys_read;
    possible += found->keys_possible;

    const auto q = testing::stored(dtype, queries);
    testing::CallOptions host_options{.dtype = dtype, .positions = {}, .indptr = indptr};
    AttendCall host = testing::make_call(layer, tokens, q.data(), host_options);
    if ((*cpu)->selects(layer)) {
      EXPECT_TRUE(same_runs(runs_of(**gpu, call.call), runs_of(**cpu, host)));
    }
  }
  return static_cast<double>(read) / static_cast<double>(std::max<uint64_t>(possible, 1));
}

}  // namespace sqz::cuda::test
