// Checks of an output before the long work.
#pragma once

#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

// Fails if `path` exists (without `force`), is one of the `inputs`, by whatever name, or cannot be
// written.
Status check_output(const std::string& path, bool force,
                    const std::vector<std::string>& inputs = {});

// `prefix` and 16 random hex digits: a name that no process takes, here or on another node.
std::string unique_name(const std::string& prefix);

}  // namespace sqz
