// A layer profile as the tools say it: fields of the result, rows for people, and a table with a
// bar chart, one line a layer.
#pragma once

#include <string>

#include "formats/layers_file.h"
#include "tools/common/output.h"

namespace sqz {

JsonMembers layers_json(const LayersFile& layers);
Rows layers_rows(const LayersFile& layers);
// Bars are 1 - cosine, what attention changes, the longest as wide as there is room.
std::string layers_table(const LayersFile& layers);

}  // namespace sqz
