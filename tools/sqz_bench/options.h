// What a benchmark run is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/common/tool.h"

namespace sqz::bench {

// The defaults are one layer of Llama-3.1-8B over 128K tokens.
struct Options {
  std::vector<std::string> cases;
  bool list = false;

  // Attention.
  int64_t tokens = 0;        // N, of the fixed context; 0 = the case's own: see tokens_of()
  int64_t query_heads = 32;  // Hq
  int64_t kv_heads = 8;      // Hkv; divides Hq
  int64_t head_dim = 128;    // d
  std::vector<double> sparsity = {0.9};   // fractions of the clustered keys that are not to be read
  std::string selector = "squeezed";      // or saap or quest: from buckets or pages
  int64_t buckets = 1024, hidden = 1024;  // C and H of its made-up query classifier
  std::string rule = "budget";       // threshold or budget; the latter reads what was asked for
  std::vector<int> levels = {1, 2};  // levels of the tree that selection uses; each is measured
  double coarse_keep = BuildOptions().coarse_keep;  // of the made-up index
  int64_t requests = 1;                // of one query token each, in a call of the case `attend`
  int64_t queries = 0;                 // prompt tokens of the case `prefill`; 0 = the case's own
  std::vector<int64_t> block = {128};  // of them share one selection; 0 = all
  std::string query_dtype = "bf16";    // of q and out: f32, f16, bf16
  std::string open_mode = "mmap";      // mmap or read
  std::string isa;                     // instruction set of the kernels; empty = the machine's best
  bool torch = true;                   // LibTorch beside ours, where it was built in
  std::string torch_dtype = "bf16,f32";
  std::string directory;   // of temporary files; empty = the system's
  std::string index;       // attend, prefill: serve this one instead of a made-up one
  std::string save_index;  // where the made-up one is left; empty = nowhere

  // Other cases.
  double file_gib = 0;       // open, upload: size of the file; 0 = the case's own
  int64_t file_layers = 32;  // open, upload
  int64_t copies = 4;        // attend on a GPU: of the layer, so that its L2 holds none of them
  int upload_threads = 0;    // upload: that copy; 0 = libsqz's own number
  int64_t kmeans_heads = 0;  // kmeans: KV heads clustered at once; 0 = the case's own
  double kmeans_fraction = 0.05;  // kmeans: clusters per point
  std::string kmeans_engine = "auto";
  std::string capture;  // keys of a model instead of made-up ones
  int gpu = -1;         // CUDA device; negative: the CPU

  int64_t repeat = 0;  // rounds; 0 = the case's own
  int threads = 0;     // resolved: at least 1
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
