// Calls with blocks of query tokens on the GPU, beside the same on the CPU.
#pragma once

#include <list>
#include <string>

#include "libruntime/kernels/cuda/common/head_dims.h"
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
  float strength = 0.6f;  // of the keys that queries look for
};

// Both backends with the same queries of requests of these lengths: results, what was read and the
// runs of the first block. Returns the part of the keys that was read.
inline double compare(const Served& served, const SelectionRequest& selection,
                      const Lengths& lengths, const BlockOptions& how = {}) {
  const Backends both(served, selection, how.block, how.sm80_kernels);
  if (!both) return 0;
  const DType dtype = how.dtype;
  const double rounding = how.rounding;
  uint64_t read = 0, possible = 0;
  for (int64_t layer = 0; layer < served.options.layers; ++layer) {
    DeviceCall call(served, layer, lengths, dtype);
    const int64_t tokens = call.call.tokens;
    std::vector<float> queries = testing::make_queries(how.wanted == nullptr ? served : *how.wanted,
                                                       layer, tokens, 7, how.strength);
    if (how.plain_queries) queries = testing::rounded(DType::kBF16, queries);
    call.set_queries(queries);
    const Status status = both.gpu->attend(call.call);
    EXPECT_TRUE(status.ok()) << status.message();
    const auto expected = testing::attend(*both.cpu, layer, queries, call.options());
    EXPECT_TRUE(expected.ok()) << expected.status().message();
    Limits limits;
    // The kernels for single tokens, which not all dimensions have, round no weights.
    if (dtype != DType::kF32 && (tokens > 1 || !is_kernel_dim(served.options.head_dim))) {
      limits = {6e-3 * rounding, 3e-3 * rounding, 1e-3 * rounding, 1e-4 * rounding, how.lse_slack};
    }
    expect_within(limits, call.output(), *expected, served.options.head_dim);

    const auto found = both.gpu->totals(layer);
    EXPECT_TRUE(found.ok());
    expect_same_counters(*found, both.cpu->counters(layer));
    read += found->keys_read;
    possible += found->keys_possible;

    const auto q = testing::stored(dtype, queries);
    const AttendCall host = testing::make_call(layer, tokens, q.data(), call.options());
    if (both.cpu->selects(layer)) {
      EXPECT_TRUE(same_runs(runs_of(*both.gpu, call.call), runs_of(*both.cpu, host)));
    }
  }
  return static_cast<double>(read) / static_cast<double>(std::max<uint64_t>(possible, 1));
}

}  // namespace sqz::cuda::test
