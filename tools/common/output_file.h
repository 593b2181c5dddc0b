// The file that a tool is to write.
#pragma once

#include <string>

#include "formats/base/status.h"

namespace sqz {

// Fails before the long work if `path` exists (without `force`) or could not be written.
Status check_output(const std::string& path, bool force);

}  // namespace sqz
