// Describes an index by its metadata, for people and scripts.
#pragma once

#include "formats/base/json.h"
#include "formats/sqz_file.h"

namespace sqz {

struct BuildReport;

// The fields that `sqz-index info --json` prints: the metadata, decoded, and as the file has it.
Result<JsonMembers> describe_index(const SqzFile& file);
// The fields that the C ABI and `sqz-index build --json` report of a finished build.
JsonMembers describe_build(const std::string& path, const BuildReport& report);

}  // namespace sqz
