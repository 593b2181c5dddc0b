#include "libruntime/kernels/cpu/kernels.h"
#include "tools/sqz_bench/bench.h"

namespace sqz::bench {

const char* const kDescription =
    "Times kernels and whole steps on this machine, beside dense attention and plain memory reads.";

const char* const kHelp =
    "Cases: 'sqz-bench --list'. Contenders of a case take turns, round by round; a figure is the\n"
    "median over rounds (least and 90th percentile beside it), 'times faster' the median of the\n"
    "ratios within a round, so that other work on the machine hits both sides alike. Indexes are "
    "made\n"
    "up: keys in clusters as k-means would find them, queries that want some of them, unless\n"
    "--capture or --index gives others (docs/performance.md). On a GPU attend and prefill are "
    "graphs\n"
    "of calls that are replayed; times are those of a call.\n"
    "\n"
    "Result: machine{cpu, cores, caches, memory_bytes, isa, compiler, version, libtorch, threads,\n"
    "load}, cases[] with case, shape, rounds, baselines[], rows[]. Events `row`: case, name,\n"
    "seconds{min, median, p90}, gb_per_s, gflop_per_s, of_read, times_faster{}; of sparse rows\n"
    "keep, budget, keys_per_run, selections; on a GPU clock{}, bytes_read or flop of a call, and\n"
    "kernels_us{} with `idle` (needs libcupti); of kmeans assignments, mean_cosine; of upload\n"
    "first_layer_seconds.\n"
    "\n"
    "Examples:\n"
    "  sqz-bench attend\n"
    "  sqz-bench attend prefill --tokens 32768 --sparsity 0.9 --levels 1,2 --json\n"
    "  sqz-bench kmeans --device cuda --kmeans-fraction 0.01\n"
    "  sqz-bench attend --device cuda --sparsity 0.7,0.8,0.9,0.95 --requests 16\n"
    "  sqz-bench prefill --device cuda --queries 4096 --block 32,128,0\n"
    "  sqz-bench upload --device cuda --directory /dev/shm\n";

namespace {

void add_shape_options(CLI::App& app, Options& options) {
  const HelpSection section(app, "Shape");
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 31);
  app.add_option(
         "--tokens", options.tokens,
         "Length of the fixed context; 0 = 131072 for attend, bandwidth and verify, 32768 for "
         "prefill, 16384 for kmeans (131072 for both with --device cuda)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31));
  app.add_option("--heads", options.query_heads, "Query heads")->check(positive);
  app.add_option("--kv-heads", options.kv_heads, "KV heads")->check(positive);
  app.add_option("--head-dim", options.head_dim, "Dimensions of a head")
      ->check(CLI::Range(1, 1024));
  app.add_option("--query-dtype", options.query_dtype, "Type of queries and outputs")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}));
  app.add_option("--requests", options.requests,
                 "attend: requests of one token each that are served at once")
      ->check(CLI::Range(1, 1024));
  app.add_option("--queries", options.queries,
                 "prefill: prompt tokens; 0 = 512, with --device cuda 4096")
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("--block", options.block,
                 "prefill: prompt tokens that share a selection, 0 = all; rows for each number")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 20));
}

void add_comparison_options(CLI::App& app, Options& options) {
  const HelpSection section(app, "What is compared");
  app.add_option("--sparsity", options.sparsity,
                 "Fractions of the clustered keys not to read, rows for each")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 0.999999));
  app.add_option(
         "--selector", options.selector,
         "attend, prefill: what chooses; saap serves from buckets, with queries before RoPE, "
         "quest from pages of 16 tokens")
      ->check(CLI::IsMember({"squeezed", "saap", "quest"}));
  app.add_option("--buckets", options.buckets, "saap: buckets of the made-up query classifier")
      ->check(CLI::Range(2, 1 << 20));
  app.add_option("--hidden", options.hidden, "saap: hidden units of it")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--rule", options.rule,
                 "How clusters are chosen; budget reads exactly what --sparsity asks for")
      ->check(CLI::IsMember({"threshold", "budget"}));
  app.add_option("--levels", options.levels, "Levels of the tree that selection uses, one row each")
      ->delimiter(',')
      ->check(CLI::Range(1, 2));
  app.add_option("--coarse-keep", options.coarse_keep,
                 "Fraction of the keys that level 1 of the made-up index lets through")
      ->check(CLI::Range(1e-6, 1.0));
  std::vector<std::string> sets = {""};
  for (const CpuKernels* kernels : available_cpu_kernels()) sets.emplace_back(kernels->name);
  app.add_option(
         "--isa", options.isa,
         "Instruction set of the kernels, of those that this machine has (default: the best)")
      ->check(CLI::IsMember(sets).description(""));
  app.add_flag("--torch,!--no-torch", options.torch,
               "LibTorch's attention too, where it was built in (default: yes)");
  app.add_option("--torch-dtype", options.torch_dtype, "Types that LibTorch computes in")
      ->check(CLI::IsMember({"f32", "bf16", "bf16,f32"}));
  app.add_option("--open-mode", options.open_mode, "How the index is opened")
      ->check(CLI::IsMember({"mmap", "read"}));

  app.add_option("--index", options.index,
                 "attend, prefill: serve layer 0 of this index instead of a made-up one")
      ->check(CLI::ExistingFile);
  app.add_option("--save-index", options.save_index,
                 "attend, prefill: leave the made-up index here");
  app.add_option("--capture", options.capture,
                 "attend, prefill, kmeans: a model's keys (.h5), not made-up ones; attend and "
                 "prefill tile them up to the shape")
      ->check(CLI::ExistingFile);
  app.add_option("--copies", options.copies,
                 "attend with --device cuda: copies of the layer that calls go over in turn")
      ->check(CLI::Range(1, 64));
}

void add_other_options(CLI::App& app, Options& options) {
  const HelpSection section(app, "Open, upload and kmeans");
  app.add_option("--file-gib", options.file_gib,
                 "open, upload: size of the file; 0 = 100 for open, where it is sparse, else 16")
      ->check(CLI::Range(0.0, 100000.0));
  app.add_option("--upload-threads", options.upload_threads,
                 "upload: threads that copy; 0 = libsqz's own number")
      ->check(CLI::Range(0, 1024));
  app.add_option("--file-layers", options.file_layers, "open, upload: layers in it")
      ->check(CLI::Range(1, 1000));
  app.add_option(
         "--kmeans-heads", options.kmeans_heads,
         "kmeans: KV heads clustered at once; 0 = 2, with --device cuda 256, with --capture "
         "as many as it has")
      ->check(CLI::Range(0, 1024));
  app.add_option("--kmeans-engine", options.kmeans_engine, "kmeans: what clusters")
      ->check(CLI::IsMember({"auto", "faiss", "faiss-gpu", "cuda"}));
  app.add_option("--kmeans-fraction", options.kmeans_fraction, "kmeans: clusters per point")
      ->check(CLI::Range(0.0001, 1.0));
}

}  // namespace

void add_bench_options(CLI::App& app, Options& options) {
  app.add_option("CASE", options.cases, "What to measure");
  app.add_flag("--list", options.list, "Name the cases and exit");
  app.add_option("--repeat", options.repeat, "Rounds; 0 = the case's own number")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_option("--directory", options.directory, "For temporary files (default: the system's)");
  add_shape_options(app, options);
  add_comparison_options(app, options);
  add_other_options(app, options);
}

}  // namespace sqz::bench
