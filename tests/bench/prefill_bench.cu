// Prefill of a layer on the GPU it runs on: prefill_bench [tokens keys [block [sparsity]]]
// Without arguments the shapes of docs/performance.md. 32 query heads, 8 KV heads, d = 128, bf16,
// Gaussian data, clusters of 20 keys; graphs of the calls are replayed and the median time taken.
// TFLOP/s of attention count 4 d for each (query, key) that is attended, those of a lookup 4 d for
// each (query, centroid): two passes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "libruntime/kernels/cuda/prefill/prefill.h"
#include "tests/bench/gpu_bench.cuh"

namespace {

using namespace sqz::cuda;
using namespace sqz::test;

constexpr int kHeads = 8, kGroup = 4, kDim = 128, kClusterKeys = 20, kFanOut = 5, kExact = 116;
constexpr Replays kReplays = {6, 40, 2, 400};

template <class T>
T* upload(const std::vector<T>& values) {
  T* data = allocate<T>(values.size());
  check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return data;
}

__nv_bfloat16* random_rows(int64_t rows, uint64_t seed) {
  auto* data = allocate<__nv_bfloat16>(rows * kDim);
  fill_kernel<<<1024, 256>>>(data, rows * kDim, seed);
  check(cudaGetLastError(), "fill");
  return data;
}

RunLists make_lists(int64_t lists, int64_t capacity) {
  RunLists out;
  out.totals = allocate<RunTotals>(lists);
  out.first = allocate<uint32_t>(lists * (capacity + 1));
  out.before = allocate<uint32_t>(lists * (capacity + 1));
  out.capacity = capacity;
  return out;
}

struct Level {
  __nv_bfloat16* centroids;
  uint32_t* offsets;
  uint32_t* sizes;
  int32_t clusters;
};

// Clusters of `children` children each, the last one of the rest; `keys` below each child.
Level make_level(int64_t under, int32_t children, int32_t keys, uint64_t seed) {
  const int32_t n = static_cast<int32_t>((under + children - 1) / children);
  std::vector<uint32_t> offsets;
  std::vector<uint32_t> sizes;
  for (int h = 0; h < kHeads; ++h) {
    for (int32_t i = 0; i <= n; ++i) {
      offsets.push_back(static_cast<uint32_t>(std::min<int64_t>(under, int64_t{i} * children)));
      if (i > 0) {
        sizes.push_back((offsets.back() - offsets[offsets.size() - 2]) * keys);
      }
    }
  }
  return {random_rows(int64_t{kHeads} * n, seed), upload(offsets), upload(sizes), n};
}

void bench(int tokens, int keys, int block, double sparsity, int multiprocessors) {
  const int blocks = (tokens + block - 1) / block, lists = blocks * kHeads;
  const int slots = keys - kExact;
  const PrefillShape shape = {sqz::DType::kBF16, kDim, kHeads, kGroup, 1 / std::sqrt(128.0f)};
  const QueryBlocks query_blocks = {tokens, blocks, block, nullptr};
  const int64_t rows = int64_t{tokens} * kHeads * kGroup;
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");

  PrefillAttend attend;
  attend.shape = shape;
  attend.blocks = query_blocks;
  attend.keys = {
      random_rows(int64_t{kHeads} * slots, 1), random_rows(int64_t{kHeads} * slots, 2), slots,
      random_rows(kHeads * kExact, 3),         random_rows(kHeads * kExact, 4),         kExact};
  attend.queries = random_rows(rows, 5);
  attend.out = random_rows(rows, 6);
  attend.lse = allocate<float>(rows);
  const int64_t bytes = prefill_attend_workspace(shape, query_blocks, multiprocessors);
  auto* workspace = allocate<uint8_t>(bytes);
  const auto run_attend = [&] {
    check(prefill_attend(attend, workspace, bytes, multiprocessors, stream));
  };

  const Level fine = make_level(slots, kClusterKeys, 1, 7);
  const Level coarse = make_level(fine.clusters, kFanOut, kClusterKeys, 8);
  const std::vector<uint32_t> wanted(kHeads, static_cast<uint32_t>((1 - sparsity) * keys));
  const RunLists chosen = make_lists(lists, fine.clusters / 2 + 1);
  const RunLists survivors = make_lists(lists, coarse.clusters / 2 + 1);
  const auto lookup_of = [&](const Level& level, const RunLists& alive, const RunLists& out) {
    PrefillLookup lookup;
    lookup.shape = shape;
    lookup.blocks = query_blocks;
    lookup.level.centroids = level.centroids;
    lookup.level.offsets = level.offsets;
    lookup.level.sizes = level.sizes;
    lookup.level.clusters = level.clusters;
    lookup.alive = alive;
    lookup.queries = attend.queries;
    lookup.chosen = out;
    return lookup;
  };
  PrefillLookup flat = lookup_of(fine, {}, chosen);
  PrefillLookup first = lookup_of(coarse, {}, survivors);
  PrefillLookup second = lookup_of(fine, survivors, chosen);
  const int64_t lookup_bytes = prefill_lookup_workspace(shape, query_blocks, fine.clusters);
  auto* lookup_workspace = allocate<uint8_t>(lookup_bytes);
  const auto run_lookup = [&](const PrefillLookup& lookup) {
    check(prefill_lookup(lookup, lookup_workspace, lookup_bytes, multiprocessors, stream));
  };
  std::vector<RunTotals> totals(lists);
  // The threshold that keeps a fraction of the children of a level's clusters.
  const auto calibrate = [&](PrefillLookup& lookup, double children, double fraction) {
    double low = -30, high = 0;
    for (int i = 0; i < 16; ++i) {
      lookup.level.log_threshold[1] = static_cast<float>((low + high) / 2);
      run_lookup(lookup);
      check(cudaStreamSynchronize(stream), "run");
      check(cudaMemcpy(totals.data(), lookup.chosen.totals, lists * sizeof(RunTotals),
                       cudaMemcpyDeviceToHost),
            "copy");
      double kept = 0;
      for (const RunTotals& total : totals) kept += total.keys;
      (kept / lists > fraction * children ? low : high) = lookup.level.log_threshold[1];
    }
  };
  calibrate(flat, slots, 1 - sparsity);

  const auto report = [&](const char* what, double time, double products) {
    std::printf("%5d x %7d block %4d  %-34s %8.3f ms %7.1f TFLOP/s\n", tokens, keys, block, what,
                time, products * rows * kDim * 2 / time * 1e-9);
    std::fflush(stdout);
  };
  report("dense", milliseconds(stream, kReplays, run_attend), 2.0 * keys);
  PrefillLookup budget = flat;
  budget.level.wanted[1] = upload(wanted);
  report("lookup, one level, budget", milliseconds(stream, kReplays, [&] { run_lookup(budget); }),
         2.0 * fine.clusters);
  report("lookup, one level", milliseconds(stream, kReplays, [&] { run_lookup(flat); }),
         2.0 * fine.clusters);
  attend.selected = chosen;
  const double attended = (1 - sparsity) * keys + kExact;
  report("attend, runs of 20", milliseconds(stream, kReplays, run_attend), 2 * attended);
  report("lookup + attend, one level",
         milliseconds(stream, kReplays,
                      [&] {
                        run_lookup(flat);
                        run_attend();
                      }),
         2 * attended);
  calibrate(first, fine.clusters, 0.5);
  calibrate(second, slots, 1 - sparsity);
  report("lookup, level 1 of 2", milliseconds(stream, kReplays, [&] { run_lookup(first); }),
         2.0 * coarse.clusters);
  report("lookup, level 2 of 2", milliseconds(stream, kReplays, [&] { run_lookup(second); }),
         1.0 * fine.clusters);
  report("lookup + attend, two levels",
         milliseconds(stream, kReplays,
                      [&] {
                        run_lookup(first);
                        run_lookup(second);
                        run_attend();
                      }),
         2 * attended);
  check(cudaMemcpy(totals.data(), chosen.totals, sizeof(RunTotals), cudaMemcpyDeviceToHost),
        "copy");
  std::printf("  first list: %u keys in %u runs\n", totals[0].keys, totals[0].runs);

  // Runs as real keys give them: 40 keys on average, no lookup.
  std::mt19937 random(1);
  const auto stride = static_cast<size_t>(chosen.capacity) + 1;
  std::vector<uint32_t> run_first(lists * stride), run_before(run_first.size());
  double real_keys = 0;
  for (int list = 0; list < lists; ++list) {
    uint32_t at = 0, count = 0, total = 0;
    while (true) {
      const uint32_t length = 1 + random() % 79;
      at += random() % static_cast<uint32_t>(79 / (1 - sparsity) * sparsity);
      if (at + length > static_cast<uint32_t>(slots)) break;
      run_first[list * stride + count] = at;
      run_before[list * stride + count++] = total;
      total += length;
      at += length;
    }
    run_before[list * stride + count] = total;
    totals[list] = {count, total, 0, 0};
    real_keys += total;
  }
  const auto copy = [&](auto* to, const auto& from) {
    check(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
          "copy");
  };
  copy(chosen.first, run_first);
  copy(chosen.before, run_before);
  copy(chosen.totals, totals);
  report("attend, runs of 40", milliseconds(stream, kReplays, run_attend),
         2 * (real_keys / lists + kExact));
  check(cudaDeviceReset(), "reset");
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  const int multiprocessors = device.multiProcessorCount;
  std::printf("%s, %d multiprocessors\n", device.name, multiprocessors);
  const auto number = [&](int i, double otherwise) {
    return argc > i ? std::atof(argv[i]) : otherwise;
  };
  if (argc > 1) {
    bench(static_cast<int>(number(1, 4096)), static_cast<int>(number(2, 131072)),
          static_cast<int>(number(3, 128)), number(4, 0.9), multiprocessors);
    return 0;
  }
  bench(4096, 131072, 128, 0.9, multiprocessors);
  bench(1024, 131072, 128, 0.9, multiprocessors);
  bench(4096, 524288, 128, 0.9, multiprocessors);
  return 0;
}
