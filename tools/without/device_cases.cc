// In place of the cases of tools/sqz_bench/ on a GPU where sqz is built without CUDA.
#include "tools/sqz_bench/cases.h"

namespace sqz::bench {

Status check_device(const Options& /*options*/) {
  return {Code::kInvalidArgument,
          "--device: this sqz was built without CUDA; build it with -DSQZ_CUDA=ON, or pass cpu"};
}

Result<CaseSetup> attend_device_case(const Options& options) {
  return check_device(options);
}
Result<CaseSetup> prefill_device_case(const Options& options) {
  return check_device(options);
}
Result<CaseSetup> upload_device_case(const Options& options) {
  return check_device(options);
}
Result<CaseSetup> kmeans_device_case(const Options& options) {
  return check_device(options);
}

}  // namespace sqz::bench
