// A whole build from made-up layers: seconds of each part, peak memory of the process, and what the
// plan said. One layer's input is in memory at a time, as in a real build.
//
//   bench_builder FILE [layers 12] [kv heads 2] [query heads 8] [tokens 31616] [dim 64] [threads 0]
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "libindex/builder.h"
#include "tests/libindex/clustered_data.h"

namespace {

double peak_rss_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

sqz::Status build(const char* path, const sqz::ModelDescription& model, int64_t n, int threads) {
  sqz::BuildOptions options;
  options.threads = threads;
  SQZ_ASSIGN_OR_RETURN(const sqz::BuildPlan plan, sqz::IndexBuilder::plan(model, n, options));
  const std::vector<int32_t> tokens(static_cast<size_t>(n), 1);
  SQZ_ASSIGN_OR_RETURN(auto builder, sqz::IndexBuilder::create(sqz::Env::posix(), path, true, model,
                                                               tokens, "", options));
  double input = 0;
  for (int64_t l = 0; l < model.layers; ++l) {
    const auto seed = static_cast<uint64_t>(l);
    const auto keys =
        sqz::test::clustered_points(model.kv_heads * n, model.head_dim, n / 40, 0.7f, seed);
    const auto queries =
        sqz::test::clustered_points(model.query_heads * options.tail, model.head_dim, 9, 1, seed);
    input = static_cast<double>(2 * keys.size() * sizeof(float)) / 0x1p20;
    const std::vector<float> values = keys;
    SQZ_RETURN_IF_ERROR(builder->add_layer(l, {keys, values, queries}));
    std::printf("layer %lld: peak memory %.0f MiB\n", static_cast<long long>(l), peak_rss_mib());
  }
  SQZ_ASSIGN_OR_RETURN(const sqz::BuildReport report, builder->finish());
  std::printf("cluster %.2f s, calibrate %.2f s, write %.2f s; %.1f MiB\n", report.seconds.cluster,
              report.seconds.calibrate, report.seconds.write,
              static_cast<double>(report.bytes) / 0x1p20);
  std::printf("peak memory %.0f MiB, of it input %.0f MiB; planned for libindex %.0f MiB\n",
              peak_rss_mib(), input, static_cast<double>(plan.peak_memory) / 0x1p20);
  std::printf("k-means %.1f GFLOP\n", plan.kmeans_flop / 1e9);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto arg = [&](int i, int64_t value) { return argc > i ? std::atoll(argv[i]) : value; };
  sqz::ModelDescription model;
  model.architecture = "LlamaForCausalLM";
  model.layers = arg(2, 12);
  model.kv_heads = arg(3, 2);
  model.query_heads = arg(4, 8);
  model.head_dim = arg(6, 64);
  model.hidden_size = model.query_heads * model.head_dim;
  model.vocab_size = 2;
  model.max_positions = 1 << 20;
  model.sliding_window.assign(static_cast<size_t>(model.layers), 0);
  model.weights_hash = "0000000000000000";
  model.attention_scale = 0.125;
  const sqz::Status status = build(argv[1], model, arg(5, 31616), static_cast<int>(arg(7, 0)));
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
