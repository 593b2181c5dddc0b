// The result rows: one a (context length, task, selector setting).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/base/json.h"
#include "tools/common/metrics.h"
#include "tools/sqz_eval/settings.h"

namespace sqz::eval {

struct Estimate {
  double value = 0, error = 0;  // standard error
};

// Of the trials that dense attention answers, those that the setting answers too.
struct Agreement {
  int64_t dense = 0, both = 0;
};

struct Row {
  int64_t tokens = 0;
  std::string task;  // "needle1", ...
  std::string on;    // "text" or "questions" of error and recall; else ""
  Setting setting;
  int64_t trials = 0;
  Estimate value;
  std::optional<Estimate> difference;  // to dense, pair by pair
  std::optional<Agreement> agreement;  // of needles
  Reads reads;
};

JsonMembers row_json(const Row& row);
// Aligned columns, a line a row, a header first.
std::string table_text(const std::vector<Row>& rows);

}  // namespace sqz::eval
