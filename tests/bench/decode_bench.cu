// Decoding on the GPU it runs on: decode_bench [--tokens N] [--requests T] [--layers L] [--dim D]
// One layer of Llama-3.1-8B (32 query heads, 8 KV heads, d 128, bf16) by default, with made-up keys
// in 5 % fine clusters under 1 % coarse ones. A graph goes over L layers of their own memory, 32
// calls in all, so that nothing is in the L2 when it is read; the median replay is divided by the
// calls. Figures: docs/performance.md.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "libruntime/kernels/cuda/decode_attend/kernel.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"

namespace {

using namespace sqz::cuda;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "decode_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void check(const sqz::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "decode_bench: %s\n", status.message().c_str());
  std::exit(1);
}

__device__ float uniform(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return (static_cast<float>(x >> 40) + 0.5f) / (1 << 24);
}

__device__ float gaussian(uint64_t i) {
  return sqrtf(-2 * logf(uniform(2 * i))) * cospif(2 * uniform(2 * i + 1));
}

__global__ void fill_kernel(__nv_bfloat16* to, int64_t count, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    to[i] = __float2bfloat16_rn(gaussian(seed + static_cast<uint64_t>(i)));
  }
}

// row i = `share` * above[i * rows above / rows] + noise
__global__ void scatter_kernel(__nv_bfloat16* to, int64_t rows, const __nv_bfloat16* above,
                               int64_t rows_above, int dim, float share, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * dim;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t up = i / dim * rows_above / rows;
    to[i] = __float2bfloat16_rn(share * __bfloat162float(above[up * dim + i % dim]) +
                                0.6f * gaussian(seed + static_cast<uint64_t>(i)));
  }
}

template <class T>
T* allocate(size_t count) {
  void* data = nullptr;
  check(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(data);
}

template <class T>
T* copied(const std::vector<T>& values) {
  T* to = allocate<T>(values.size());
  check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return to;
}

struct Setup {
  int64_t tokens = 131072, requests = 1, layers = 4;
  int dim = 128, kv_heads = 8, group = 4;
  int64_t exact = 116;
  int64_t slots() const { return tokens - exact; }
  int64_t fine() const { return tokens / 20; }
  int64_t coarse() const { return tokens / 100; }
};

struct Layer {
  LookupParams lookup;
  AttendParams attend;
};

// Sizes around the mean, like exp(N(0, 0.6)).
std::vector<uint32_t> cuts(int64_t n, int64_t end, uint32_t seed) {
  std::vector<double> weight(static_cast<size_t>(n));
  double sum = 0;
  for (double& w : weight) {
    double x = 0;
    for (int i = 0; i < 12; ++i) {
      seed = seed * 1664525u + 1013904223u;
      x += (seed >> 8) / 16777216.0;
    }
    w = std::exp(0.6 * (x - 6));
    sum += w;
  }
  std::vector<uint32_t> out = {0};
  double at = 0;
  for (int64_t i = 0; i < n; ++i) {
    at += weight[static_cast<size_t>(i)] / sum * static_cast<double>(end - n);
    out.push_back(static_cast<uint32_t>(i + 1 + std::llround(at)));
  }
  out.back() = static_cast<uint32_t>(end);
  return out;
}

void set_level(LookupLevel& level, int64_t n, int64_t end, const Setup& s,
               const std::vector<uint32_t>* below, std::vector<uint32_t>& sizes_out) {
  std::vector<uint32_t> offsets, sizes;
  std::vector<float> logs;
  for (int h = 0; h < s.kv_heads; ++h) {
    const auto own = cuts(n, end, static_cast<uint32_t>(h * 31 + n));
    offsets.insert(offsets.end(), own.begin(), own.end());
    for (int64_t i = 0; i < n; ++i) {
      uint32_t size = own[i + 1] - own[i];
      if (below != nullptr) {
        size = 0;
        for (uint32_t c = own[i]; c < own[i + 1]; ++c) size += (*below)[h * end + c];
      }
      sizes.push_back(size);
      logs.push_back(std::log(static_cast<float>(size)));
    }
  }
  level.clusters = static_cast<int32_t>(n);
  level.offsets = copied(offsets);
  level.sizes = copied(sizes);
  level.log_sizes = copied(logs);
  sizes_out = std::move(sizes);
}

double milliseconds(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue();
  check(cudaStreamEndCapture(stream, &graph), "end of capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 24; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(executable, stream), "launch");
    check(cudaEventRecord(end, stream), "record");
    check(cudaStreamSynchronize(stream), "run");
    float time = 0;
    check(cudaEventElapsedTime(&time, begin, end), "elapsed time");
    if (i > 3) times.push_back(time);
  }
  check(cudaGraphExecDestroy(executable), "graph");
  check(cudaGraphDestroy(graph), "graph");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

class Bench {
 public:
  explicit Bench(const Setup& setup) : s_(setup) {
    check(cudaStreamCreate(&stream_), "stream");
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "device");
    multiprocessors_ = device.multiProcessorCount;
    hopper_ = device.major >= 9;
    make_layers();
    LookupParams shape = layers_[0].lookup;
    most_team_ = most_team(shape, 0).value();
    std::printf(
        "%s, %ld tokens, %ld requests, %d query heads, %d KV heads, d %d, %ld layers, team %d\n",
        device.name, s_.tokens, s_.requests, s_.kv_heads * s_.group, s_.kv_heads, s_.dim, s_.layers,
        team());
    std::printf("%-34s %9s %9s %9s %7s %7s %8s %7s\n", "", "us/call", "lookup", "attend", "keys",
                "run", "GB/s", "MB");
  }

  void dense() {
    for (Layer& layer : layers_) layer.attend.lists.totals = nullptr;
    const double time = run(false, true);
    const double bytes = 4.0 * s_.kv_heads * s_.tokens * s_.dim;
    std::printf("%-34s %9.2f %9s %9.2f %7.3f %7s %8.0f %7.1f\n", "dense", time, "", time, 1.0, "",
                bytes / time * 1e-3, bytes * 1e-6);
    for (Layer& layer : layers_) layer.attend.lists = layer.lookup.lists;
  }

  void sparse(int levels, double keep, LookupRule rule) {
    std::vector<uint32_t> wanted(static_cast<size_t>(s_.kv_heads),
                                 static_cast<uint32_t>(keep * static_cast<double>(s_.slots())));
    check(cudaMemcpy(wanted_, wanted.data(), wanted.size() * 4, cudaMemcpyHostToDevice), "copy");
    for (Layer& layer : layers_) {
      LookupParams& p = layer.lookup;
      p.rule = rule;
      p.levels = levels;
      p.level[0] = levels == 2 ? coarse_[&layer - layers_.data()] : fine_[&layer - layers_.data()];
      p.level[1] = fine_[&layer - layers_.data()];
    }
    if (levels == 2) calibrate(0, 0.5);
    if (rule == LookupRule::kThreshold) calibrate(levels - 1, keep);
    const double both = run(true, true), lookup = run(true, false), attend = run(false, true);
    double keys = 0, runs = 0;
    for (const RunTotals& t : totals(layers_[0])) {
      keys += t.keys;
      runs += t.runs;
    }
    unsigned long long counters[3];
    check(cudaMemset(counters_, 0, sizeof(counters)), "memset");
    check(decode_lookup(layers_[0].lookup, team(), stream_));
    check(cudaStreamSynchronize(stream_), "lookup");
    check(cudaMemcpy(counters, counters_, sizeof(counters), cudaMemcpyDeviceToHost), "copy");
    const double pairs = static_cast<double>(s_.requests * s_.kv_heads);
    const double bytes = (2 * (keys + pairs * s_.exact) + counters[2]) * 2.0 * s_.dim;
    char name[64];
    std::snprintf(name, sizeof(name), "%d levels, %s, keep %.2f", levels,
                  rule == LookupRule::kThreshold ? "threshold" : "budget", keep);
    std::printf("%-34s %9.2f %9.2f %9.2f %7.3f %7.1f %8.0f %7.1f\n", name, both, lookup, attend,
                keys / (pairs * s_.slots()), keys / runs, bytes / both * 1e-3, bytes * 1e-6);
  }

 private:
  int team() const {
    int team = 1;
    while (team * 2 <= most_team_ && team * 2 * s_.requests * s_.kv_heads <= multiprocessors_) {
      team *= 2;
    }
    return team;
  }

  double run(bool lookup, bool attend) {
    constexpr int kCalls = 32;
    const double time = milliseconds(stream_, [&] {
      for (int i = 0; i < kCalls; ++i) {
        const Layer& layer = layers_[static_cast<size_t>(i % s_.layers)];
        if (lookup) check(decode_lookup(layer.lookup, team(), stream_));
        if (attend) check(decode_attend(layer.attend, stream_));
      }
    });
    return time * 1e3 / kCalls;
  }

  std::vector<RunTotals> totals(const Layer& layer) {
    std::vector<RunTotals> out(static_cast<size_t>(s_.requests * s_.kv_heads));
    check(decode_lookup(layer.lookup, team(), stream_));
    check(cudaStreamSynchronize(stream_), "lookup");
    check(cudaMemcpy(out.data(), layer.lookup.lists.totals, out.size() * sizeof(RunTotals),
                     cudaMemcpyDeviceToHost),
          "copy");
    return out;
  }

  // The threshold of a level that keeps a fraction of the keys.
  void calibrate(int level, double keep) {
    for (Layer& layer : layers_) {
      const LookupParams before = layer.lookup;
      LookupParams& p = layer.lookup;
      p.rule = LookupRule::kThreshold;
      float low = -60, high = 0;
      // A coarse level alone: its sizes stand for keys, so it is asked as if it were the finest.
      std::vector<uint32_t> sizes;
      if (level + 1 < p.levels) {
        p.levels = level + 1;
        p.level[level] = coarse_keys_[&layer - layers_.data()];
      }
      for (int i = 0; i < 24; ++i) {
        p.level[level].threshold = (low + high) / 2;
        double keys = 0;
        for (const RunTotals& t : totals(layer)) keys += t.keys;
        const double kept = keys / static_cast<double>(s_.requests * s_.kv_heads * s_.slots());
        (kept > keep ? low : high) = p.level[level].threshold;
      }
      const float found = p.level[level].threshold;
      layer.lookup = before;
      layer.lookup.level[level].threshold = found;
    }
  }

  void make_layers() {
    const int64_t heads = s_.kv_heads, pairs = s_.requests * heads, width = s_.fine();
    AttendParams attend;
    LookupParams lookup;
    lookup.dim = attend.dim = s_.dim;
    lookup.requests = attend.requests = static_cast<int32_t>(s_.requests);
    lookup.kv_heads = attend.kv_heads = s_.kv_heads;
    lookup.group = attend.group = s_.group;
    lookup.scale = attend.scale = 1.4426950408889634f / std::sqrt(static_cast<float>(s_.dim));
    lookup.hopper = attend.hopper = hopper_;
    lookup.slots = static_cast<uint32_t>(s_.slots());
    lookup.width = width;
    lookup.logits = allocate<float>(pairs * s_.group * width);
    lookup.alive = allocate<uint32_t>(pairs * 2 * width);
    RunLists lists;
    lists.capacity = width / 2 + width / 64 + 2 * kMostTeam;
    lists.mark_capacity = s_.slots() / kMarkKeys + 1;
    lists.totals = allocate<RunTotals>(pairs);
    lists.first = allocate<uint32_t>(pairs * (lists.capacity + 1));
    lists.before = allocate<uint32_t>(pairs * (lists.capacity + 1));
    lists.marks = allocate<uint32_t>(pairs * lists.mark_capacity);
    lookup.lists = attend.lists = lists;
    counters_ = allocate<unsigned long long>(3);
    lookup.counters = attend.counters = counters_;
    wanted_ = allocate<uint32_t>(heads);
    lookup.wanted = wanted_;
    attend.slots = s_.slots();
    attend.exact = s_.exact;
    attend.multiprocessors = multiprocessors_;
    const size_t workspace = decode_attend_workspace(multiprocessors_, s_.dim);
    attend.workspace = allocate<char>(workspace);
    check(cudaMemset(attend.workspace, 0, workspace), "memset");
    const int64_t query_rows = pairs * s_.group;
    auto* q = allocate<__nv_bfloat16>(query_rows * s_.dim);
    attend.out = allocate<__nv_bfloat16>(query_rows * s_.dim);
    attend.lse = allocate<float>(query_rows);
    lookup.q = attend.q = q;

    LookupLevel fine, coarse, coarse_keys;
    std::vector<uint32_t> fine_sizes, coarse_sizes;
    set_level(fine, s_.fine(), s_.slots(), s_, nullptr, fine_sizes);
    set_level(coarse, s_.coarse(), s_.fine(), s_, &fine_sizes, coarse_sizes);
    coarse_keys = coarse;
    std::vector<uint32_t> offsets;
    for (int h = 0; h < s_.kv_heads; ++h) {
      uint32_t at = 0;
      for (int64_t i = 0; i < s_.coarse(); ++i) {
        offsets.push_back(at);
        at += coarse_sizes[h * s_.coarse() + i];
      }
      offsets.push_back(at);
    }
    coarse_keys.offsets = copied(offsets);

    uint64_t seed = 1;
    const auto rows = [&](int64_t count) {
      auto* to = allocate<__nv_bfloat16>(count * s_.dim);
      fill_kernel<<<2048, 256>>>(to, count * s_.dim, seed);
      seed += static_cast<uint64_t>(count * s_.dim);
      return to;
    };
    for (int64_t l = 0; l < s_.layers; ++l) {
      auto* top = rows(heads * s_.coarse());
      auto* middle = allocate<__nv_bfloat16>(heads * s_.fine() * s_.dim);
      scatter_kernel<<<2048, 256>>>(middle, heads * s_.fine(), top, heads * s_.coarse(), s_.dim, 1,
                                    seed += 1u << 30);
      if (l == 0) {
        // Queries that want some coarse clusters: a part of one each, and noise.
        scatter_kernel<<<64, 256>>>(q, query_rows, top, heads * s_.coarse(), s_.dim, 0.5f,
                                    seed += 1u << 30);
      }
      attend.keys = rows(heads * s_.slots());
      attend.values = rows(heads * s_.slots());
      attend.exact_keys = rows(heads * s_.exact);
      attend.exact_values = rows(heads * s_.exact);
      coarse.centroids = coarse_keys.centroids = top;
      fine.centroids = middle;
      fine_.push_back(fine);
      coarse_.push_back(coarse);
      coarse_keys_.push_back(coarse_keys);
      layers_.push_back({lookup, attend});
      layers_.back().lookup.level[0] = fine;
    }
    check(cudaDeviceSynchronize(), "fill");
  }

  Setup s_;
  cudaStream_t stream_ = nullptr;
  int multiprocessors_ = 0, most_team_ = 1;
  bool hopper_ = false;
  unsigned long long* counters_ = nullptr;
  uint32_t* wanted_ = nullptr;
  std::vector<Layer> layers_;
  std::vector<LookupLevel> fine_, coarse_, coarse_keys_;
};

}  // namespace

int main(int argc, char** argv) {
  Setup setup;
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    const auto is = [&](const char* name) { return std::strcmp(argv[i], name) == 0; };
    if (is("--quick")) {
      quick = true;
    } else if (i + 1 < argc) {
      const int64_t value = std::atoll(argv[i + 1]);
      if (is("--tokens")) setup.tokens = value;
      if (is("--requests")) setup.requests = value;
      if (is("--layers")) setup.layers = value;
      if (is("--dim")) setup.dim = static_cast<int>(value);
      ++i;
    }
  }
  Bench bench(setup);
  bench.dense();
  bench.sparse(1, 0.1, LookupRule::kThreshold);
  bench.sparse(2, 0.1, LookupRule::kThreshold);
  bench.sparse(2, 0.1, LookupRule::kBudget);
  if (quick) return 0;
  for (const double keep : {0.3, 0.2, 0.05}) bench.sparse(2, keep, LookupRule::kThreshold);
  return 0;
}
