// The benchmarks of sqz-bench: each function registers one for every combination of its lists.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/sqz_bench/device.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {

struct AttentionOptions {
  MadeIndex made;
  std::string index, save_index;  // paths; empty: the index is made, and removed again
  bool prompt = false;            // one request of `queries` tokens, else requests of one token
  std::vector<int64_t> requests = {1};  // without `prompt`
  int64_t contexts = 0;  // on a GPU: requests name one of so many in turn, in device memory
  std::vector<int64_t> queries = {512}, block = {128};  // with `prompt`
  std::vector<std::string> rules = {"budget"};
  std::vector<int> levels = {1, 2};
  std::vector<double> keep = {0.1};
};
Status add_attention(const AttentionOptions& options, std::shared_ptr<const Device> device);

struct KmeansOptions {
  int64_t points = 16384, heads = 2, dim = 128;
  double clusters = 0.05;  // a point
  int iterations = 10;     // one more assignment follows
  uint64_t seed = 0;
};
void add_kmeans(const KmeansOptions& options, std::shared_ptr<const Device> gpu);

// Google Benchmark reports the failure and goes on; the program fails at its end.
void fail(benchmark::State& state, const std::string& message);

}  // namespace sqz::bench
