// An index as a tool prints it.
#pragma once

#include "formats/sqz_file.h"
#include "tools/common/output.h"

namespace sqz {

// All metadata, decoded, and `metadata`, the file's own strings.
JsonMembers index_json(const SqzFile& file, const Calibration& calibration);
Rows index_rows(const SqzFile& file, const Calibration& calibration);

}  // namespace sqz
