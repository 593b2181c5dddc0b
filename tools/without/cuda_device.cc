// In place of tools/sqz_bench/cuda_*.cc where sqz is built without CUDA.
#include "tools/sqz_bench/benchmarks.h"

namespace sqz::bench {

Result<std::unique_ptr<Device>> make_gpu(int /*number*/, const std::string& /*capability*/) {
  return Status(Code::kInvalidArgument,
                "--device: this sqz was built without CUDA; build it with -DSQZ_CUDA=ON, or pass "
                "--device cpu");
}

void add_kmeans(const KmeansOptions& /*options*/, std::shared_ptr<const Device> /*gpu*/) {}

}  // namespace sqz::bench
