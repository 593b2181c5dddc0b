// Rows of sqz-eval, read back.
#pragma once

#include <string>

#include "formats/base/json.h"
#include "tools/report/results.h"

namespace sqz {

// kCorrupt for what is no such row; `label` opens the message.
Result<EvalRow> eval_row(const JsonValue& row, const std::string& label);

}  // namespace sqz
