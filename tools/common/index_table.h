// The description of an index, as JSON and as a table.
#pragma once

#include "formats/sqz_file.h"
#include "tools/common/output.h"

namespace sqz {

// The source of a calibration, in words.
std::string calibration_text(const std::string& source);

// All metadata, decoded; the member `metadata` has the strings of the file.
JsonMembers index_json(const SqzFile& file, const Calibration& calibration);
Rows index_rows(const SqzFile& file, const Calibration& calibration);

}  // namespace sqz
