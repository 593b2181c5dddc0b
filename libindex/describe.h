// Describes an index by its metadata, for people and scripts.
#pragma once

#include "formats/base/json.h"
#include "formats/sqz_file.h"

namespace sqz {

// The fields that `sqz-index info --json` prints: the metadata, decoded, and as the file has it.
Result<JsonMembers> describe_index(const SqzFile& file);

}  // namespace sqz
