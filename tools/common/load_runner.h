// The one place where a tool asks for LibTorch: built with training/ it loads the model, built
// without (SQZ_TRAINING=OFF) it says how to get it.
#pragma once

#include "training/runner.h"

namespace sqz {

Result<std::unique_ptr<Runner>> load_runner(const std::string& directory,
                                            const RunnerOptions& options);

}  // namespace sqz
