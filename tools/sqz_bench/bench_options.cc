#include "libruntime/kernels/cpu/kernels.h"
#include "tools/common/tool.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

const char* const kDescription =
    "Times kernels and whole steps on this machine, beside dense attention and plain memory reads.";

const char* const kHelp =
    R"(Cases: 'sqz-bench --list'. Contenders of a case take turns, round by round; a figure is the
median over rounds (least and 90th percentile beside it), 'times faster' the median of the
ratios within a round, so that other work on the machine hits both sides alike. Indexes are made
up: keys in clusters as k-means would find them, queries that want some of them, unless
--capture or --index gives others (docs/performance.md). On a GPU attend and prefill are graphs
of calls that are replayed; times are those of a call.

Result: machine{cpu, cores, caches, memory_bytes, isa, compiler, version, libtorch, threads,
load}, cases[] with case, shape, rounds, baselines[], rows[]. Events `row`: case, name,
seconds{min, median, p90}, gb_per_s, gflop_per_s, of_read, times_faster{}; of sparse rows
keep, budget, keys_per_run, selections, and for single tokens on a GPU error, the mean relative
difference to dense attention over keys and values of 16 bits; on a GPU clock{}, route, bytes_read or flop of a call,
and kernels_us{} with `idle` (needs libcupti); of kmeans assignments, mean_cosine; of upload
first_layer_seconds.

Examples:
  sqz-bench attend
  sqz-bench attend prefill --tokens 32768 --sparsity 0.9 --levels 1,2 --json
  sqz-bench kmeans --device cuda --kmeans-fraction 0.01
  sqz-bench attend --device cuda --sparsity 0.7,0.8,0.9,0.95 --requests 16
  sqz-bench prefill --device cuda --queries 4096 --block 32,128,0
  sqz-bench upload --device cuda --directory /dev/shm
)";

// In the order of --help: groups with their options, each with its name, where its value goes, what
// it takes, and what it is. Values of a list are divided by commas.
void add_bench_options(CLI::App& app, Options& o) {
  std::string group = "Options";
  const auto add = [&]<class T>(const char* name, T& value, const CLI::Validator& takes,
                                const char* what) {
    CLI::Option* option = app.add_option(name, value, what)->check(takes)->group(group);
    option->capture_default_str();
    if constexpr (!std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>) {
      option->delimiter(',');
    }
  };
  using CLI::IsMember, CLI::Range;
  const CLI::Validator any;
  const auto whole = [](int64_t least, int64_t most) { return Range(least, most); };
  constexpr int64_t kMost = int64_t{1} << 31;
  std::vector<std::string> sets = {""};
  for (const CpuKernels* kernels : available_cpu_kernels()) sets.emplace_back(kernels->name);

  app.add_option("CASE", o.cases, "What to measure");
  app.add_flag("--list", o.list, "Name the cases and exit");
  add("--repeat", o.repeat, whole(0, 1000000), "Rounds; 0 = the case's own number");
  add("--directory", o.directory, any, "For temporary files (default: the system's)");

  group = "Shape";
  add("--tokens", o.tokens, whole(0, kMost),
      "Length of the fixed context; 0 = 131072 for attend, bandwidth and verify, 32768 for "
      "prefill, 16384 for kmeans (131072 for both with --device cuda)");
  add("--heads", o.query_heads, whole(1, kMost), "Query heads");
  add("--kv-heads", o.kv_heads, whole(1, kMost), "KV heads");
  add("--head-dim", o.head_dim, whole(1, 1024), "Dimensions of a head");
  add("--query-dtype", o.query_dtype, IsMember({"f32", "f16", "bf16"}),
      "Type of queries and outputs");
  add("--requests", o.requests, whole(1, 1024),
      "attend: requests of one token each that are served at once; with --capture they ask with "
      "the queries of tokens that follow each other, which want as much in common as questions do");
  add("--queries", o.queries, whole(0, 1 << 20),
      "prefill: prompt tokens; 0 = 512, with --device cuda 4096");
  add("--block", o.block, whole(0, 1 << 20),
      "prefill: prompt tokens that share a selection, 0 = all; rows for each number");

  group = "What is compared";
  add("--sparsity", o.sparsity, real_number(0.0, 0.999999),
      "Fractions of the clustered keys not to read, rows for each");
  add("--selector", o.selector, IsMember({"squeezed", "saap", "quest"}),
      "attend, prefill: what chooses; saap serves from buckets, with queries before RoPE, "
      "quest from pages of 16 tokens");
  add("--buckets", o.buckets, whole(2, 1 << 20), "saap: buckets of the made-up query classifier");
  add("--hidden", o.hidden, whole(1, 1 << 16), "saap: hidden units of it");
  add("--rule", o.rule, IsMember({"threshold", "budget"}),
      "How clusters are chosen; budget reads exactly what --sparsity asks for");
  add("--levels", o.levels, whole(1, 2), "Levels of the tree that selection uses, one row each");
  add("--level-fractions", o.level_fractions, real_number(1e-6, 1.0),
      "Clusters a token of both levels of the index that is made, coarse to fine");
  add("--rows", o.rows, IsMember({"bf16", "q8", "q4"}),
      "attend, prefill: rows of that index, of clusters; others than bf16 without LibTorch");
  add("--key-codes", o.key_codes, Range(0, 2),
      "attend, prefill: bits a dimension of its key codes; with them a CPU estimates what is not "
      "read, and a GPU does without them");
  add("--coarse-keep", o.coarse_keep, real_number(1e-6, 1.0),
      "Fraction of the keys that level 1 of the made-up index lets through");
  add("--isa", o.isa, IsMember(sets).description(""),
      "Instruction set of the kernels, of those that this machine has (default: the best)");
  app.add_flag("--torch,!--no-torch", o.torch,
               "LibTorch's attention too, where it was built in (default: yes)")
      ->group(group);
  add("--torch-dtype", o.torch_dtype, IsMember({"f32", "bf16", "bf16,f32"}).description(""),
      "Types that LibTorch computes in: f32, bf16 or bf16,f32");
  add("--open-mode", o.open_mode, IsMember({"mmap", "read"}), "How the index is opened");
  add("--index", o.index, any,
      "attend, prefill: serve layer 0 of this index instead of a made-up one");
  add("--save-index", o.save_index, any, "attend, prefill: leave the made-up index here");
  add("--capture", o.capture, any,
      "attend, prefill, kmeans: a model's keys (.h5), not made-up ones; attend and "
      "prefill tile them up to the shape");
  add("--compute-capability", o.compute_capability,
      IsMember({"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}),
      "With --device cuda: serve as from a GPU of this compute capability, with its shared memory "
      "and the kernels for it (default: what there is)");
  add("--copies", o.copies, whole(1, 64),
      "attend with --device cuda: copies of the layer that calls go over in turn");

  group = "Open, upload and kmeans";
  add("--file-gib", o.file_gib, real_number(0.0, 100000.0),
      "open, upload: size of the file; 0 = 100 for open, where it is sparse, else 16");
  add("--upload-threads", o.upload_threads, whole(0, 1024),
      "upload: threads that copy; 0 = libsqz's own number");
  add("--file-layers", o.file_layers, whole(1, 1000), "open, upload: layers in it");
  add("--kmeans-heads", o.kmeans_heads, whole(0, 1024),
      "kmeans: KV heads clustered at once; 0 = 2, with --device cuda 256, with --capture "
      "as many as it has");
  add("--kmeans-engine", o.kmeans_engine, IsMember({"auto", "faiss", "faiss-gpu", "cuda"}),
      "kmeans: what clusters");
  add("--kmeans-fraction", o.kmeans_fraction, real_number(0.0001, 1.0),
      "kmeans: clusters per point");
}

}  // namespace sqz::bench
