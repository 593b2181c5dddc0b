// What a benchmark run is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libindex/builder.h"

namespace CLI {
class App;
}
namespace sqz {
struct ToolContext;
}

namespace sqz::bench {

// bench_options.cc says what each is. The defaults are one layer of Llama-3.1-8B over 128K tokens;
// 0 stands for the case's own number, which it takes by tokens_or() and its like.
struct Options {
  std::vector<std::string> cases;
  bool list = false;
  int64_t repeat = 0;  // rounds

  // Attention, N tokens, Hq, Hkv, d; Hkv divides Hq.
  int64_t tokens = 0, query_heads = 32, kv_heads = 8, head_dim = 128;
  int64_t requests = 1, queries = 0;  // query tokens of `attend`, of `prefill`
  std::vector<int64_t> block = {128};
  std::vector<double> sparsity = {0.9};
  std::vector<int> levels = {1, 2};
  std::vector<double> level_fractions = {0.01, 0.05};  // two, coarse to fine
  std::string rows = "bf16";
  int key_codes = 0;
  std::string selector = "squeezed", rule = "budget";
  int64_t buckets = 1024, hidden = 1024;  // C and H of the made-up query classifier
  double coarse_keep = BuildOptions().coarse_keep;
  std::string query_dtype = "bf16", open_mode = "mmap", isa;
  bool torch = true;
  std::string torch_dtype = "bf16,f32";
  std::string directory, index, save_index, capture;  // paths; empty = none
  int64_t copies = 4;
  std::string compute_capability;  // "8.0"; empty = the GPU's

  // Other cases.
  double file_gib = 0;
  int64_t file_layers = 32;
  int upload_threads = 0;  // 0 = libsqz's own number
  int64_t kmeans_heads = 0;
  double kmeans_fraction = 0.05;
  std::string kmeans_engine = "auto";

  // From the common options.
  int gpu = -1;     // CUDA device; negative: the CPU
  int threads = 0;  // resolved: at least 1
  uint64_t seed = 0;

  static int64_t either(int64_t asked, int64_t fallback) { return asked > 0 ? asked : fallback; }
  int64_t tokens_or(int64_t fallback) const { return either(tokens, fallback); }
  int64_t queries_or(int64_t fallback) const { return either(queries, fallback); }
  int64_t kmeans_heads_or(int64_t fallback) const { return either(kmeans_heads, fallback); }
  int64_t repeat_or(int64_t fallback) const { return either(repeat, fallback); }
  double file_gib_or(double fallback) const { return file_gib > 0 ? file_gib : fallback; }
};

extern const char* const kDescription;
extern const char* const kHelp;
void add_bench_options(CLI::App& app, Options& options);

Status run_bench(Options options, const ToolContext& context);

}  // namespace sqz::bench
