// In place of training/runner.cc where sqz is built without LibTorch.
#include "training/runner.h"

namespace sqz {

Result<std::unique_ptr<Runner>> Runner::load(const std::string& directory, const RunnerOptions&) {
  return Status(Code::kUnsupported,
                concat(directory,
                       ": this sqz was built without LibTorch and cannot run a model; build it "
                       "with -DSQZ_TRAINING=ON, or capture elsewhere and pass --capture FILE.h5"));
}

}  // namespace sqz
