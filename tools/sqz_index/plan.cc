#include "tools/sqz_index/plan.h"

#include <algorithm>

namespace sqz {

uint64_t pass_memory(const ModelConfig& model, int64_t tokens, const RunnerOptions& options) {
  const ModelDescription& m = model.description;
  const auto n = static_cast<double>(tokens);
  const auto hidden = static_cast<double>(m.hidden_size);
  const auto inner = static_cast<double>(model.intermediate_size);
  const auto queries = static_cast<double>(m.query_heads * m.head_dim);
  const auto keys = static_cast<double>(m.kv_heads * m.head_dim);
  const double layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner;
  const double embeddings =
      hidden * static_cast<double>(m.vocab_size) * (model.tie_embeddings ? 1 : 2);
  const auto element = static_cast<double>(dtype_size(options.dtype));
  const bool stored = options.device == "cpu" && options.dtype == DType::kF32;
  const auto of_weight = stored ? static_cast<double>(dtype_size(model.dtype)) : element;
  const double weights = of_weight * (embeddings + static_cast<double>(m.layers) * layer);
  // The residual stream, its norm and the attention output; queries; keys and values, and once
  // more as float32 for the consumer.
  double states = element * n * (3 * hidden + 2 * queries + 2 * keys) + 4 * n * 2 * keys;
  if (options.device != "cpu") {
    // Norms and the MLP take a block at a time. The attention's output is there as the kernel
    // wrote it, and twice as float32 while it is put in order.
    states = element * n * (hidden + 2 * queries + 2 * keys) + 8 * n * queries +
             element * static_cast<double>(std::min(tokens, kGpuChunk)) * (4 * inner + 2 * hidden);
  }
  return static_cast<uint64_t>(weights + states);
}

void PlanTotal::add(const BuildPlan& plan, int64_t tokens, uint64_t pass, bool gpu_pass) {
  const uint64_t on_cpu = gpu_pass ? 0 : pass, on_gpu = gpu_pass ? pass : 0;
  const bool first = indexes_++ == 0;
  tokens_ += tokens;
  sum_.bytes += plan.bytes;
  sum_.peak_memory = std::max(sum_.peak_memory, plan.peak_memory + on_cpu);
  sum_.gpu_memory = std::max(sum_.gpu_memory, plan.gpu_memory + on_gpu);
  sum_.gpu_memory_least = std::max(sum_.gpu_memory_least, plan.gpu_memory_least + on_gpu);
  sum_.clusters = first ? plan.clusters : std::vector<int64_t>();  // of one index only
  sum_.pages = first ? plan.pages : 0;
}

void PlanTotal::print(const ToolContext& context) const {
  context.output.result({{"dry_run", true},
                         {"indexes", indexes_},
                         {"tokens", tokens_},
                         {"clusters", sum_.clusters},
                         {"pages", sum_.pages},
                         {"bytes", sum_.bytes},
                         {"peak_memory", sum_.peak_memory},
                         {"gpu_memory", sum_.gpu_memory},
                         {"gpu_memory_least", sum_.gpu_memory_least}});
}

}  // namespace sqz
