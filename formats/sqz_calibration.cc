// The calibration of a .sqz index: parameters in "__metadata__", tables in three F32 tensors.
#include <algorithm>
#include <cmath>

#include "formats/json_fields.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

// Index of the first value that breaks `rule`, or -1.
template <class Rule>
int64_t first_bad(const std::vector<float>& values, Rule rule) {
  const auto at = std::find_if_not(values.begin(), values.end(), rule);
  return at == values.end() ? -1 : at - values.begin();
}

// A table of the calibration and what it must be.
struct Table {
  const char* name;
  const std::vector<float>& values;
  int64_t size;
  enum Kind { kThresholds, kCurves, kShares } kind;  // curves: thresholds that do not rise
};

Status check_table(const Table& table, const std::string& label, Code code) {
  const auto refuse = [&](int64_t index, const char* expected) {
    return Status(code, bad_field(label, concat("calibration.", table.name, "[", index, "]"),
                                  concat(table.values[static_cast<size_t>(index)]), expected));
  };
  if (std::cmp_not_equal(table.values.size(), table.size)) {
    return {code, bad_field(label, concat("calibration.", table.name),
                            concat(table.values.size(), " values"), concat(table.size))};
  }
  if (table.kind == Table::kShares) {
    const auto is_share = [](float share) { return share >= 0.0f && share <= 1.0f; };
    const int64_t bad = first_bad(table.values, is_share);
    return bad < 0 ? Status() : refuse(bad, "a number in [0, 1]");
  }
  // A log threshold of -infinity keeps everything; +infinity or NaN would silently keep nothing.
  const auto is_threshold = [](float t) { return t < INFINITY; };
  if (const int64_t bad = first_bad(table.values, is_threshold); bad >= 0) {
    return refuse(bad, "a finite number or -infinity");
  }
  for (size_t i = 1; i < table.values.size() && table.kind == Table::kCurves; ++i) {
    const bool same_curve = i % static_cast<size_t>(Calibration::kGrid) != 0;
    if (same_curve && table.values[i] > table.values[i - 1]) {
      return refuse(static_cast<int64_t>(i), "at most the one before");
    }
  }
  return {};
}

}  // namespace

std::string calibration_text(const Calibration& calibration) {
  return JsonText({{"queries", calibration.queries},
                   {"source", calibration.source},
                   {"coarse_keep", calibration.coarse_keep}})
      .str();
}

Status parse_calibration_text(const std::string& text, int levels, const std::string& path,
                              Calibration& calibration) {
  const std::string label = path + ": __metadata__: calibration";
  SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json(text, label));
  JsonFields fields(json.root(), label);
  calibration.queries = fields.integer("queries", 0, int64_t{1} << 40);
  calibration.source = fields.text("source");
  const JsonValue* keep = fields.value("coarse_keep");
  const auto want = static_cast<size_t>(std::max(levels - 1, 0));
  if (keep && (!keep->is_array() || keep->size() != want)) {
    fields.complain("coarse_keep", concat("an array of ", want));
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  for (const JsonValue& fraction : keep->items()) {
    const double value = fraction.number();  // 0 if it is none
    if (!(value > 0.0 && value <= 1.0)) {
      fields.complain_of("coarse_keep", found_text(fraction), "a number in (0, 1]");
      return fields.status();
    }
    calibration.coarse_keep.push_back(value);
  }
  return {};
}

Status check_calibration(const Calibration& calibration, const IndexMetadata& metadata,
                         const std::string& label, Code code) {
  using C = Calibration;
  const int64_t coarse_levels = std::max(metadata.levels - 1, 1);
  const int64_t shares = C::kScopes * metadata.model.layers * metadata.model.kv_heads * C::kGrid;
  std::vector<Table> tables;
  if (metadata.levels > 0) {
    if (std::cmp_not_equal(calibration.coarse_keep.size(), metadata.levels - 1)) {
      return {code, bad_field(label, "calibration.coarse_keep",
                              concat(calibration.coarse_keep.size(), " values"),
                              concat(metadata.levels - 1))};
    }
    tables.push_back({"thresholds", calibration.thresholds,
                      C::kScopes * C::kPaths * C::kGroups * C::kGrid, Table::kCurves});
    tables.push_back({"coarse", calibration.coarse, C::kScopes * C::kGroups * coarse_levels,
                      Table::kThresholds});
    tables.push_back({"shares", calibration.shares, shares, Table::kShares});
  }
  if (metadata.key_calibration) {
    tables.push_back(
        {"keys.thresholds", calibration.key_thresholds, C::kScopes * C::kGrid, Table::kCurves});
    tables.push_back({"keys.shares", calibration.key_shares, shares, Table::kShares});
  }
  for (const Table& table : tables) SQZ_RETURN_IF_ERROR(check_table(table, label, code));
  return {};
}

}  // namespace sqz
