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
  std::vector<int64_t> requests = {1};                  // without `prompt`
  std::vector<int64_t> queries = {512}, block = {128};  // with `prompt`
  std::vector<std::string> rules = {"budget"};
  std::vector<int> levels = {1, 2};
  std::vector<double> keep = {0.1};
};
Status add_attention(const AttentionOptions& options, std::shared_ptr<const Device> device);

// Points are N(0, 1): without clusters of their own, the hardest case.
struct KmeansOptions {
  int64_t points = 16384, heads = 2, dim = 128;
  double clusters = 0.05;  // a point
  int iterations = 10;     // one more assignment follows
  uint64_t seed = 0;
  int threads = 1;

  int64_t cluster_count() const;
  double flop() const;  // of the assignments
  // bfloat16 numbers. Of more than 8 heads some have the same points; clusters differ all the same.
  std::vector<float> points_of(int64_t head) const;
};
// Registers a benchmark of the device's engine (libindex/kmeans.h), with points and labels in host
// memory, and on a GPU add_kmeans_kernels().
Status add_kmeans(const KmeansOptions& options, const std::shared_ptr<const Device>& device);
// The kernels of the engine `cuda` alone (libindex/cuda/kmeans.h), with points in GPU memory.
void add_kmeans_kernels(const KmeansOptions& options, std::shared_ptr<const Device> gpu);

// Google Benchmark reports the failure and goes on; the program fails at its end.
void fail(benchmark::State& state, const std::string& message);

}  // namespace sqz::bench
