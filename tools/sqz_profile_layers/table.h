// A layer profile for people.
#pragma once

#include <string>

#include "formats/layers_file.h"
#include "tools/common/output.h"

namespace sqz {

Rows layers_rows(const LayersFile& layers);
// A line and a bar a layer. The bar is 1 - cosine, the change by attention, relative to the
// largest.
std::string layers_table(const LayersFile& layers);

}  // namespace sqz
