// In place of tools/sqz_generate/device_staging.cc where sqz is built without CUDA.
#include "tools/sqz_generate/device_staging.h"

namespace sqz {

Result<std::unique_ptr<DeviceStaging>> DeviceStaging::create(int) {
  return Status(Code::kInvalidArgument,
                "--device cuda: this sqz was built without CUDA; build it with -DSQZ_CUDA=ON");
}

}  // namespace sqz
