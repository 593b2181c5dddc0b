#include "tools/sqz_index/plan.h"

#include <algorithm>

#include "formats/base/parallel.h"

namespace sqz {
namespace {

// Round figures for one core of a current x86-64 server with AVX-512, the work around the matrix
// products included; not measured on the machine at hand. docs/results.md has them beside builds.
constexpr double kPassFlopPerSecond = 80e9;
constexpr double kKmeansFlopPerSecond = 80e9;
// And of a GPU of Hopper's size, in bfloat16, which docs/performance.md has beside a build.
constexpr double kGpuPassFlopPerSecond = 380e12;
constexpr double kGpuKmeansFlopPerSecond = 170e12;
constexpr double kGpuStartSeconds = 4;  // model, driver, calibration

}  // namespace

PassPlan plan_pass(const ModelConfig& model, int64_t tokens, const RunnerOptions& options) {
  const ModelDescription& m = model.description;
  const auto n = static_cast<double>(tokens);
  const auto hidden = static_cast<double>(m.hidden_size);
  const auto layers = static_cast<double>(m.layers);
  const auto queries = static_cast<double>(m.query_heads * m.head_dim);
  const auto keys = static_cast<double>(m.kv_heads * m.head_dim);
  const double projections = hidden * (2 * queries + 2 * keys);
  const double mlp = 3 * hidden * static_cast<double>(model.intermediate_size);
  const double embeddings =
      hidden * static_cast<double>(m.vocab_size) * (model.tie_embeddings ? 1 : 2);
  const auto element = static_cast<double>(dtype_size(options.dtype));

  PassPlan out;
  const bool stored = options.device == "cpu" && options.dtype == DType::kF32;
  const auto of_weight = stored ? static_cast<double>(dtype_size(model.dtype)) : element;
  const double weights = of_weight * (embeddings + layers * (projections + mlp));
  // The residual stream, its norm and the attention output; queries; keys and values, and once
  // more as float32 for the consumer.
  double states = element * n * (3 * hidden + 2 * queries + 2 * keys) + 4 * n * 2 * keys;
  if (options.device != "cpu") {
    // Norms and the MLP take a block at a time. The attention's output is there as the kernel
    // wrote it, and twice as float32 while it is put in order.
    const auto inner = static_cast<double>(model.intermediate_size);
    states = element * n * (hidden + 2 * queries + 2 * keys) + 8 * n * queries +
             element * static_cast<double>(std::min(tokens, kGpuChunk)) * (4 * inner + 2 * hidden);
  }
  out.memory = static_cast<uint64_t>(weights + states);
  // Causal: half of the N x N products of queries with keys, and of weights with values.
  out.flop = layers * (2 * n * (projections + mlp) + 2 * n * n * queries);
  return out;
}

double estimate_seconds(double pass_flop, double kmeans_flop, int threads, bool gpu) {
  if (gpu) {
    return kGpuStartSeconds + pass_flop / kGpuPassFlopPerSecond +
           kmeans_flop / kGpuKmeansFlopPerSecond;
  }
  const double used = resolve_threads(threads);
  return (pass_flop / kPassFlopPerSecond + kmeans_flop / kKmeansFlopPerSecond) / used;
}

}  // namespace sqz
