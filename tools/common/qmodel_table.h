// The description of a query classifier.
#pragma once

#include "formats/qmodel_file.h"
#include "tools/common/output.h"

namespace sqz {

JsonMembers qmodel_json(const QmodelFile& qmodel);  // without the networks
// {"0.05": 0.13, ...}: recall by selectivity.
JsonMembers recall_json(const std::vector<QmodelRecall>& recall);

}  // namespace sqz
