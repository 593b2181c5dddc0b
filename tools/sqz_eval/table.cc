#include "tools/sqz_eval/table.h"

#include <algorithm>
#include <filesystem>

#include "tools/common/output.h"

namespace sqz::eval {
namespace {

using Line = std::vector<std::string>;

constexpr const char* kNone = "-";
constexpr size_t kTextColumns = 5;  // the first columns are text, the others numbers

std::string estimate_text(const Estimate& estimate) {
  return fixed_text(estimate.value, 4) + " +- " + fixed_text(estimate.error, 4);
}

JsonText estimate_json(const Estimate& estimate) {
  return {{"value", estimate.value}, {"stderr", estimate.error}};
}

Line header() {
  return {"task",   "selector", "levels", "rule",  "layers",   "tokens", "asked", "delivered",
          "lowest", "highest",  "keys",   "value", "to dense", "agree",  "n"};
}

Line line_of(const Row& row) {
  const Setting& setting = row.setting;
  const SelectorOptions& options = setting.options;
  const Reads& reads = row.reads;
  Line out = {row.on.empty() ? row.task : row.task + " " + row.on,
              options.selector + setting.coding(),
              !setting.has_levels() ? kNone
              : options.levels == 0 ? "all"
                                    : concat(options.levels),
              setting.has_rule() ? options.rule : kNone,
              setting.dense() ? kNone : std::filesystem::path(options.layers).filename().string(),
              concat(row.tokens)};
  for (const double number : {reads.asked_budget, reads.delivered_budget(), reads.lowest,
                              reads.highest, reads.delivered_keep()}) {
    out.push_back(fixed_text(number, 4));
  }
  out.insert(out.end(),
             {estimate_text(row.value), row.difference ? estimate_text(*row.difference) : kNone,
              row.agreement ? concat(row.agreement->both, "/", row.agreement->dense) : kNone,
              concat(row.trials)});
  return out;
}

}  // namespace

JsonMembers row_json(const Row& row) {
  JsonMembers out = to_json(row.setting);
  out["task"] = row.task;
  if (!row.on.empty()) out["on"] = row.on;
  out["tokens"] = row.tokens;
  out["trials"] = row.trials;
  out["value"] = row.value.value;
  out["stderr"] = row.value.error;
  if (row.difference) out["difference"] = estimate_json(*row.difference);
  if (row.agreement) {
    out["agreement"] = {{"dense", row.agreement->dense}, {"both", row.agreement->both}};
  }
  out["budget"] = {{"asked", row.reads.asked_budget},
                   {"delivered", row.reads.delivered_budget()},
                   {"lowest", row.reads.lowest},
                   {"highest", row.reads.highest}};
  out["keep"] = {{"asked", row.reads.asked_keep}, {"delivered", row.reads.delivered_keep()}};
  out["dense_fallback"] = row.reads.dense_fallback;
  return out;
}

std::string table_text(const std::vector<Row>& rows) {
  std::vector<Line> lines = {header()};
  for (const Row& row : rows) lines.push_back(line_of(row));
  return columns_text(lines, kTextColumns);
}

}  // namespace sqz::eval
