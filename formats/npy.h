// NumPy .npy files holding token ids: one-dimensional, little-endian, integer, C order; versions 1
// to 3. Errors name the file and what was found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/file.h"

namespace sqz {

// Ids must be in [0, 2^31): a value outside names its index in the array.
Result<std::vector<int32_t>> read_npy_tokens(Env& env, const std::string& path);

}  // namespace sqz
