// sqz-bench: times attention from an index, and k-means on a GPU.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include <iostream>

#include "libruntime/kernels/cpu/kernels.h"
#include "sqz/sqz.hpp"
#include "tools/common/tool.h"
#include "tools/sqz_bench/benchmarks.h"

namespace sqz::bench {
namespace {

bool failed = false;

class Cpu final : public Device {
 public:
  int number() const override { return -1; }
  void* stream() const override { return nullptr; }
  std::shared_ptr<void> copy(std::span<const std::byte> bytes) const override {
    const auto memory = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
    return {memory, memory->data()};
  }
  void time(benchmark::State& state, int64_t /*graph_calls*/,
            const std::function<void(int64_t)>& call,
            const std::function<void()>& warm) const override {
    call(0);
    warm();
    int64_t i = 0;
    for (auto _ : state) call(i++);
  }
};

constexpr const char* kHelp =
    R"(A benchmark has a name like attend/sparse/keep:0.1/rule:budget/levels:1/requests:1.
Options that begin with --benchmark_ are Google Benchmark's: --benchmark_filter=REGEX,
--benchmark_repetitions=N, --benchmark_enable_random_interleaving=true,
--benchmark_report_aggregates_only=true, --benchmark_format=json, --benchmark_out=FILE, and others.

Counters: keys, the share of the clustered keys that was read; bytes, the same of all bytes, with
centroids, sinks and recent window; keys_a_run, the mean length of the runs of selected keys;
bytes_per_s and flop_per_s. On a GPU a time is of CUDA graphs of calls over copies of the layer.
Keys and queries are made up (tools/sqz_bench/made_index.h), queries and outputs bfloat16;
--index takes the keys of a file.

Examples:
  sqz-bench attend --keep 0.1,0.05 --benchmark_repetitions=10
  sqz-bench attend --device cuda --rule threshold --requests 1,4,16,64
  sqz-bench prefill --device cuda --tokens 131072 --queries 4096 --block 32,128
  sqz-bench attend --save-index 128k.sqz --benchmark_filter=dense
  sqz-bench kmeans --device cuda --tokens 131072 --kv-heads 8

Exit codes: 0 ok; 1 a benchmark failed, or an output exists; 2 options that cannot be used; 3 a bad index file.
)";

// The options of a command.
struct Options {
  AttentionOptions attention;
  KmeansOptions kmeans;
  CommonOptions common;
  std::string compute_capability;
};

template <class T>
CLI::Option* add_one(CLI::App& app, const char* name, T& value, const CLI::Validator& takes,
                     const char* what) {
  return app.add_option(name, value, what)->check(takes)->capture_default_str();
}
template <class T>
CLI::Option* add_list(CLI::App& app, const char* name, T& value, const CLI::Validator& takes,
                      const char* what) {
  return add_one(app, name, value, takes, what)->delimiter(',');
}

// Adds the options that MadeIndex and KmeansOptions share.
void add_common(CLI::App& app, Options& o, int64_t& tokens, int64_t& kv_heads, int64_t& head_dim) {
  add_one(app, "--tokens", tokens, whole_number(1000), "Length of the fixed context");
  add_one(app, "--kv-heads", kv_heads, whole_number(1), "KV heads");
  add_one(app, "--head-dim", head_dim, CLI::Range(1, 1024), "Dimensions of a head");
  add_one(app, "--threads", o.common.threads, CLI::Range(0, 4096), "CPU threads; 0 = all cores");
  app.add_option("--seed", o.common.seed, "Seed of everything random");
  add_one(app, "--device", o.common.device, device_name(), "cpu, cuda or cuda:N");
  app.allow_extras();
}

void add_attention_options(CLI::App& app, Options& o) {
  AttentionOptions& a = o.attention;
  add_common(app, o, a.made.tokens, a.made.kv_heads, a.made.head_dim);
  add_one(app, "--heads", a.made.query_heads, whole_number(1), "Query heads");
  auto* selector =
      add_one(app, "--selector", a.made.selector, CLI::IsMember({"squeezed", "saap", "quest"}),
              "Selector of the index that is made: squeezed (clusters), saap (buckets of a "
              "classifier) or quest (pages)");
  add_one(app, "--buckets", a.made.buckets, CLI::Range(2, 1 << 20),
          "saap: buckets, and hidden units of the classifier");
  const CLI::Validator share = real_number(1e-6, 1);
  add_list(app, "--keep", a.keep, share, "Shares of the clustered keys to read");
  add_list(app, "--rule", a.rules, CLI::IsMember({"budget", "threshold"}),
           "How clusters are chosen; budget reads the asked share");
  add_list(app, "--levels", a.levels, CLI::Range(1, 16), "Levels of the centroid tree to use");
  app.add_option("--index", a.index, "Serve layer 0 of this index")->excludes(selector);
  app.add_option("--save-index", a.save_index, "Leave the index that is made here")
      ->excludes("--index");
  app.add_option("--compute-capability", o.compute_capability,
                 "Serve as from a GPU of this compute capability (default: that of the GPU)")
      ->check(CLI::IsMember({"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}));
}

Status check_shape(const MadeIndex& made) {
  const auto refuse = [](const char* field, const auto& found, const std::string& expected) {
    return Status(Code::kInvalidArgument, bad_field("options", field, concat(found), expected));
  };
  if (made.query_heads % made.kv_heads != 0) {
    return refuse("--heads", made.query_heads, concat("a multiple of --kv-heads ", made.kv_heads));
  }
  if (made.selector == "saap" && made.buckets > made.slots()) {
    return refuse("--buckets", made.buckets,
                  concat("at most the ", made.slots(), " clustered keys"));
  }
  return {};
}

Result<std::shared_ptr<const Device>> make_device(const Options& o) {
  const auto number = o.common.gpu();
  if (!number) return std::shared_ptr<const Device>(std::make_shared<Cpu>());
  SQZ_ASSIGN_OR_RETURN(std::shared_ptr<const Device> gpu, make_gpu(*number, o.compute_capability));
  return gpu;
}

Status run_benchmarks(const std::string& command, Options o, std::vector<std::string> rest) {
  o.attention.prompt = command == "prefill";
  o.attention.made.threads = limited_threads(o.common.threads);
  o.attention.made.seed = o.kmeans.seed = o.common.seed;
  SQZ_RETURN_IF_ERROR(check_shape(o.attention.made));
  for (const std::string& option : rest) {
    if (option.starts_with("--benchmark_")) continue;
    return {Code::kInvalidArgument,
            bad_field("options", option, "it", "an option of sqz-bench " + command)};
  }
  SQZ_ASSIGN_OR_RETURN(const auto device, make_device(o));
  benchmark::AddCustomContext("kernels", cpu_kernels().name);
  benchmark::AddCustomContext("threads", concat(o.attention.made.threads));
  benchmark::AddCustomContext("sqz", sqz_version());
  if (command != "kmeans") {
    SQZ_RETURN_IF_ERROR(add_attention(o.attention, device));
  } else if (device->number() >= 0) {
    add_kmeans(o.kmeans, device);
  } else {
    return {Code::kInvalidArgument,
            bad_field("options", "--device", o.common.device, "cuda or cuda:N")};
  }
  rest.insert(rest.begin(), "sqz-bench");
  std::vector<char*> argv;
  for (std::string& option : rest) argv.push_back(option.data());
  int argc = static_cast<int>(argv.size());
  argv.push_back(nullptr);
  benchmark::Initialize(&argc, argv.data());
  if (argc > 1) {
    return {Code::kInvalidArgument,
            bad_field("options", argv[1], "it", "an option of Google Benchmark")};
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return failed ? Status(Code::kInternal, "a benchmark failed") : Status();
}

int main_of(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stderr_color_mt("sqz-bench"));
  CLI::App app("Times attention from an index, dense and sparse, and k-means on a GPU.",
               "sqz-bench");
  app.set_version_flag("--version", concat("sqz-bench ", SQZ_VERSION));
  app.require_subcommand(1)->footer(kHelp);
  Options attend, prefill, kmeans;
  prefill.attention.made.tokens = 32768;
  CLI::App* sub = app.add_subcommand("attend", "Requests of one token each");
  add_attention_options(*sub, attend);
  add_list(*sub, "--requests", attend.attention.requests, CLI::Range(1, 1024),
           "Requests that are served at once");
  add_one(*sub, "--contexts", attend.attention.contexts, whole_number(0),
          "On a GPU: copies of the index that requests name in turn, in its memory; 0 = one index");
  sub = app.add_subcommand("prefill", "The tokens of a prompt");
  add_attention_options(*sub, prefill);
  add_list(*sub, "--queries", prefill.attention.queries, whole_number(1), "Tokens of the prompt");
  add_list(*sub, "--block", prefill.attention.block, whole_number(0),
           "Tokens that share a selection; 0 = all");
  sub = app.add_subcommand("kmeans", "The clustering of a layer's keys, on a GPU");
  KmeansOptions& k = kmeans.kmeans;
  add_common(*sub, kmeans, k.points, k.heads, k.dim);
  add_one(*sub, "--clusters", k.clusters, real_number(1e-6, 1), "Clusters a key");
  add_one(*sub, "--iterations", k.iterations, CLI::Range(1, 1000),
          "Iterations; one more assignment follows");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  const CLI::App* command = app.get_subcommands().front();
  const std::string name = command->get_name();
  Status status;
  try {
    status = run_benchmarks(name,
                            name == "attend"    ? attend
                            : name == "prefill" ? prefill
                                                : kmeans,
                            command->remaining());
  } catch (const runtime::Error& error) {
    status = Status(static_cast<Code>(error.status()), error.what());
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, error.what());
  }
  if (status.ok()) status = finish_stdout();
  if (!status.ok()) std::cerr << "sqz-bench: " << status.message() << '\n';
  return exit_code(status);
}

}  // namespace

void fail(benchmark::State& state, const std::string& message) {
  failed = true;
  state.SkipWithError(message.c_str());
}

}  // namespace sqz::bench

int main(int argc, char** argv) {
  return sqz::bench::main_of(argc, argv);
}
