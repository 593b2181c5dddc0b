#include "tools/sqz_eval/table.h"

#include <algorithm>
#include <filesystem>

#include "tools/common/output.h"

namespace sqz::eval {
namespace {

using Line = std::vector<std::string>;

constexpr const char* kNone = "-";
constexpr size_t kTextColumns = 7;  // the first ones are text; the rest are numbers

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
  const SelectorTraits& traits = *row.setting.traits;
  const SelectorOptions& options = row.setting.options;
  Line out = {row.on.empty() ? row.task : row.task + " " + row.on,
              options.selector + row.setting.coding(),
              !traits.levels        ? kNone
              : options.levels == 0 ? "all"
                                    : concat(options.levels),
              traits.rule ? options.rule : kNone,
              traits.budget ? std::filesystem::path(options.layers).filename().string() : kNone,
              concat(row.tokens)};
  if (!row.skipped.empty()) {
    out.insert(out.end(), {fixed_text(options.budget.value_or(1), 4), "skipped"});
    out.resize(header().size(), kNone);
    return out;
  }
  out.insert(out.end(),
             {fixed_text(row.reads.asked_budget, 4), fixed_text(row.reads.delivered_budget(), 4),
              fixed_text(row.reads.lowest, 4), fixed_text(row.reads.highest, 4),
              fixed_text(row.reads.delivered_keep(), 4), estimate_text(row.value),
              row.difference ? estimate_text(*row.difference) : kNone,
              row.agreement ? concat(row.agreement->both, "/", row.agreement->dense) : kNone,
              concat(row.trials)});
  return out;
}

// What the profile of --layers was made for.
JsonText allocation_json(const LayerBudgets& budgets) {
  return {{"name", budgets.allocation},
          {"p", budgets.p},
          {"budget",
           static_cast<double>(budgets.uniform_budget) / static_cast<double>(budgets.context)}};
}

}  // namespace

JsonMembers row_json(const Row& row) {
  const SelectorTraits& traits = *row.setting.traits;
  const SelectorOptions& options = row.setting.options;
  JsonMembers out = {{"task", row.task}, {"tokens", row.tokens}, {"selector", options.selector}};
  if (!row.on.empty()) out["on"] = row.on;
  if (row.setting.rows != RowKind::k16) out["rows"] = rows_name(row.setting.rows);
  if (row.setting.key_codes > 0) out["key_codes"] = row.setting.key_codes;
  if (traits.levels) out["levels"] = options.levels;
  if (traits.rule) out["rule"] = options.rule;
  if (traits.budget) out["layers"] = options.layers;
  if (options.layer_budgets) out["allocation"] = allocation_json(*options.layer_budgets);
  out["block"] = options.block;
  if (options.dense_layers && !row.setting.dense()) out["dense_layers"] = *options.dense_layers;
  if (!row.skipped.empty()) {
    out["skipped"] = row.skipped;
    out["budget"] = {{"asked", options.budget.value_or(1)}};
    return out;
  }
  out["trials"] = row.trials;
  out["value"] = row.value.value;
  out["stderr"] = row.value.error;
  if (row.difference) out["difference"] = estimate_json(*row.difference);
  if (row.agreement) {
    out["agreement"] = {{"dense", row.agreement->dense}, {"both", row.agreement->both}};
  }
  if (row.context_error) out["context_error"] = estimate_json(*row.context_error);
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
