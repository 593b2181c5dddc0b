// Stands in for kmeans_device.cc in builds without CUDA.
#include "tools/sqz_bench/kmeans_device.h"

namespace sqz::bench {

Status check_kmeans_device(const Options& /*options*/) {
  return {Code::kUnsupported,
          "--device: this sqz was built without CUDA; build it with -DSQZ_CUDA=ON, or pass cpu"};
}

Result<CaseSetup> kmeans_device_case(const Options& options, KmeansPoints /*points*/) {
  return check_kmeans_device(options);
}

}  // namespace sqz::bench
