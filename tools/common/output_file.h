// The file that a tool is to write.
#pragma once

#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

// kInvalidArgument if an output is one of the `inputs`, by whatever name, and whether it is there
// or not. Of a folder that is read, name the files in it: model_files() and so on.
Status check_not_inputs(const std::vector<std::string>& outputs,
                        const std::vector<std::string>& inputs);

// Fails before the long work if `path` exists (without `force`), is one of the `inputs` or could
// not be written.
Status check_output(const std::string& path, bool force,
                    const std::vector<std::string>& inputs = {});

// Makes the folder and those above it, as far as they are not there. Messages begin with `label`.
Status make_folder(const std::string& folder, const std::string& label);

}  // namespace sqz
