// The only place where a tool asks for LibTorch. In a build with training/ it loads the model. In a
// build without (SQZ_TRAINING=OFF) it returns an error that says how to get LibTorch.
#pragma once

#include "training/runner.h"

namespace sqz {

Result<std::unique_ptr<Runner>> load_runner(const std::string& directory,
                                            const RunnerOptions& options);

}  // namespace sqz
