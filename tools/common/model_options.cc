#include "tools/common/model_options.h"

namespace sqz {

void add_run_dtype_option(CLI::App& app, std::string& run_dtype) {
  app.add_option("--run-dtype", run_dtype,
                 "What the model computes in (default: f32 on the CPU, bf16 on a GPU)")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

RunnerOptions runner_options(const std::string& run_dtype, const CommonOptions& common) {
  RunnerOptions out;
  out.device = common.device;
  const bool bf16 = run_dtype == "bf16" || (run_dtype.empty() && common.gpu());
  out.dtype = bf16 ? DType::kBF16 : DType::kF32;
  out.threads = common.threads;
  return out;
}

}  // namespace sqz
