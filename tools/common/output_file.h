// The file that a tool is to write.
#pragma once

#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

// kInvalidArgument if `path` is one of the `inputs`, whether it is there or not.
Status check_not_input(const std::string& path, const std::vector<std::string>& inputs);

// Fails before the long work if `path` exists (without `force`), is one of the `inputs` or could
// not be written.
Status check_output(const std::string& path, bool force,
                    const std::vector<std::string>& inputs = {});

// Makes the folder and those above it, as far as they are not there. Messages begin with `label`.
Status make_folder(const std::string& folder, const std::string& label);

}  // namespace sqz
