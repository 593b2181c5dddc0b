#include "tools/report/eval_rows.h"

#include <cmath>
#include <filesystem>

#include "formats/json_fields.h"
#include "tools/common/layer_policy.h"

namespace sqz {
namespace {

// ", layers measured" or ", layers l.sqz (groups, p = 0.7, for budget 0.05)".
std::string layers_text(JsonFields& fields, double asked, const std::string& label) {
  const std::string path = fields.text("layers", kUniformLayers);
  if (path == kUniformLayers) return "";
  const JsonValue* object = fields.find("allocation");
  if (object == nullptr) {
    return ", layers " + std::filesystem::path(path).filename().string();
  }
  JsonFields allocation(*object, label + ": allocation");
  std::string out = ", layers " + allocation.text("name");
  const double p = allocation.number("p", 0, 1);
  const double budget = allocation.number("budget", 0, 1);
  if (p != 1) out += concat(", p = ", p);
  // A profile is a line of its own where it is asked for another budget than it was made for.
  if (std::abs(budget - asked) > 0.01 * asked) out += concat(", made for budget ", budget);
  if (!allocation.status().ok())
    fields.complain_of("allocation", "another object", "name, p, budget");
  return out;
}

std::string setting_of(JsonFields& fields, double asked, const std::string& label) {
  std::string out = fields.text("selector");
  if (fields.has("rows")) out += ", rows " + fields.text("rows");
  if (fields.has("key_codes")) out += concat(", key codes ", fields.integer("key_codes", 1, 2));
  if (fields.has("levels")) {
    const int64_t levels = fields.integer("levels", 0, 16);
    if (levels > 0) out += concat(", ", levels, levels == 1 ? " level" : " levels");
  }
  if (fields.has("rule")) out += ", rule " + fields.text("rule");
  const std::string group = fields.text("group", "mean");
  if (group != "mean") out += ", group " + group;
  if (fields.has("dense_layers")) {
    out += concat(", dense layers ", fields.integer("dense_layers", 0, INT64_MAX));
  }
  return out + layers_text(fields, asked, label);
}

// The two numbers of an object in a row: 0 where it is not one, which is then complained about.
struct Two {
  double first = 0, second = 0;
};
Two two_of(JsonFields& fields, const char* key, const char* first, const char* second,
           const std::string& label) {
  const JsonValue* object = fields.value(key);
  if (object == nullptr) return {};
  JsonFields inner(*object, concat(label, ": ", key));
  const Two out{inner.number(first, -kMostPlotted, kMostPlotted),
                inner.number(second, -kMostPlotted, kMostPlotted)};
  if (!inner.status().ok()) {
    fields.complain(key, concat("numbers ", first, " and ", second));
  }
  return out;
}

}  // namespace

Result<EvalRow> eval_row(const JsonValue& row, const std::string& label) {
  JsonFields fields(row, label);
  SQZ_RETURN_IF_ERROR(fields.status());
  EvalRow out;
  out.task = fields.text("task");
  out.on = fields.text("on", "");
  out.tokens = fields.integer("tokens", 1, INT64_MAX);
  out.dense = fields.text("selector") == "dense";
  if (fields.has("skipped")) {
    out.skipped = fields.text("skipped");
    out.asked_budget = two_of(fields, "budget", "asked", "asked", label).first;
  } else {
    out.trials = fields.integer("trials", 0, INT64_MAX);
    out.value = fields.number("value", -kMostPlotted, kMostPlotted);
    out.error = fields.number("stderr", 0, kMostPlotted);
    const Two budget = two_of(fields, "budget", "asked", "delivered", label);
    const Two keep = two_of(fields, "keep", "asked", "delivered", label);
    out.asked_budget = budget.first;
    out.budget = budget.second;
    out.asked_keep = keep.first;
    out.keep = keep.second;
    if (fields.has("difference")) {
      const Two difference = two_of(fields, "difference", "value", "stderr", label);
      out.difference = difference.first;
      out.difference_error = difference.second;
    }
  }
  out.setting = setting_of(fields, out.asked_budget, label);
  if (fields.has("mass")) {
    const Two mass = two_of(fields, "mass", "asked", "estimated", label);
    out.setting += concat(", mass ", mass.first);
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

}  // namespace sqz
