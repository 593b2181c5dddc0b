// What a benchmark run is asked for, and the shape that its cases share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/dtype.h"

namespace sqz::bench {

// The defaults are one layer of Llama-3.1-8B over 128K tokens.
struct Options {
  std::vector<std::string> cases;
  bool list = false;

  // Attention.
  int64_t tokens = 0;                // N, of the fixed context; 0 = the case's own: see tokens_of()
  int64_t query_heads = 32;          // Hq
  int64_t kv_heads = 8;              // Hkv; divides Hq
  int64_t head_dim = 128;            // d
  double sparsity = 0.9;             // fraction of the clustered keys that is not to be read
  std::string rule = "budget";       // threshold or budget; the latter reads what was asked for
  std::vector<int> levels = {1, 2};  // levels of the tree that selection uses; each is measured
  int64_t queries = 512;             // prompt tokens of the case `prefill`
  int64_t block = 128;               // of them share one selection
  std::string query_dtype = "bf16";  // of q and out: f32, f16, bf16
  std::string open_mode = "mmap";    // mmap or read
  std::string isa;                   // instruction set of the kernels; empty = the machine's best
  bool torch = true;                 // LibTorch beside ours, where it was built in
  std::string torch_dtype = "bf16,f32";
  std::string directory;  // of temporary files; empty = the system's

  // Other cases.
  double file_gib = 100;          // open: size of the sparse file
  int64_t file_layers = 32;       // open
  int64_t kmeans_heads = 0;       // kmeans: KV heads clustered at once; 0 = the case's own
  double kmeans_fraction = 0.05;  // kmeans: clusters per point
  std::string kmeans_engine = "auto";
  std::string capture;  // kmeans: keys to cluster instead of made-up ones
  int gpu = -1;         // kmeans: CUDA device of its kernels; negative: an engine, from host memory

  int64_t repeat = 0;  // rounds; 0 = the case's own
  int threads = 0;     // resolved: at least 1
  uint64_t seed = 0;

  int64_t tokens_or(int64_t fallback) const { return tokens > 0 ? tokens : fallback; }
  int64_t repeat_or(int64_t fallback) const { return repeat > 0 ? repeat : fallback; }
};

}  // namespace sqz::bench
