// An index as a tool prints it.
#pragma once

#include "formats/sqz_file.h"
#include "tools/common/output.h"

namespace sqz {

// A source as people read it.
std::string calibration_text(const std::string& source);

// All metadata, decoded, and `metadata`, the file's own strings.
JsonMembers index_json(const SqzFile& file, const Calibration& calibration);
Rows index_rows(const SqzFile& file, const Calibration& calibration);

}  // namespace sqz
