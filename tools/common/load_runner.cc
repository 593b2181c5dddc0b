#include "tools/common/model_options.h"

namespace sqz {

Result<std::unique_ptr<Runner>> load_runner(const std::string& directory,
                                            const RunnerOptions& options) {
  return Runner::load(directory, options);
}

}  // namespace sqz
