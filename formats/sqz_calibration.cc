// The calibration of a .sqz index: parameters in "__metadata__", tables in three F32 tensors.
#include <algorithm>
#include <cmath>

#include "formats/base/checked.h"
#include "formats/json_fields.h"
#include "formats/sqz_metadata.h"

namespace sqz {
namespace {

// Older versions have the curves of three group policies: mean, max, any.
constexpr int64_t kVersionOfOnePolicy = 3, kOldPolicies = 3;

// Index of the first value that breaks `rule`, or -1.
template <class Rule>
int64_t first_bad(std::span<const float> values, Rule rule) {
  const auto at = std::find_if_not(values.begin(), values.end(), rule);
  return at == values.end() ? -1 : at - values.begin();
}

Status check_table(const CalibrationTable& table, std::span<const float> values,
                   const Refuse& refuse) {
  const auto refuse_number = [&](int64_t index, const char* expected) {
    return refuse(concat(table.name, "[", index, "]"), values[static_cast<size_t>(index)],
                  expected);
  };
  const int64_t size = checked_elements(table.shape).value_or(-1);
  if (std::ssize(values) != size) return refuse(table.name, concat(values.size(), " values"), size);
  if (table.kind == CalibrationTable::kShares) {
    const auto is_share = [](float share) { return share >= 0.0f && share <= 1.0f; };
    const int64_t bad = first_bad(values, is_share);
    return bad < 0 ? Status() : refuse_number(bad, "a number in [0, 1]");
  }
  // A log threshold of -infinity keeps everything; +infinity or NaN would silently keep nothing.
  const auto is_threshold = [](float t) { return t < INFINITY; };
  if (const int64_t bad = first_bad(values, is_threshold); bad >= 0) {
    return refuse_number(bad, "a finite number or -infinity");
  }
  for (size_t i = 1; i < values.size() && table.kind == CalibrationTable::kCurves; ++i) {
    const bool same_curve = i % static_cast<size_t>(Calibration::kGrid) != 0;
    if (same_curve && values[i] > values[i - 1]) {
      return refuse_number(static_cast<int64_t>(i), "at most the one before");
    }
  }
  return {};
}

// Keeps the first row of each kOldPolicies rows.
void keep_first_policy(std::vector<float>& rows, int64_t length) {
  const auto step = kOldPolicies * length;
  auto to = rows.begin();
  for (auto from = rows.begin(); from != rows.end(); from += step) {
    to = std::copy_n(from, length, to);
  }
  rows.erase(to, rows.end());
}

}  // namespace

void drop_old_policies(const IndexMetadata& metadata, Calibration& calibration) {
  if (metadata.version >= kVersionOfOnePolicy || metadata.levels == 0) return;
  keep_first_policy(calibration.thresholds, Calibration::kGrid);
  keep_first_policy(calibration.coarse, std::max(metadata.levels - 1, 1));
}

Result<Calibration> read_calibration(JsonFields metadata, int levels) {
  JsonFields in = metadata.object(kCalibrationKey);
  Calibration out;
  out.queries = in.integer("queries", 0, int64_t{1} << 40);
  out.source = in.text("source");
  out.coarse_keep = in.numbers("coarse_keep", 0, 1);
  const bool positive = std::none_of(out.coarse_keep.begin(), out.coarse_keep.end(),
                                     [](double fraction) { return fraction == 0; });
  if (std::ssize(out.coarse_keep) != std::max(levels - 1, 0) || !positive) {
    in.complain("coarse_keep", concat(std::max(levels - 1, 0), " numbers in (0, 1]"));
  }
  SQZ_RETURN_IF_ERROR(in.status());
  return out;
}

std::vector<CalibrationTable> calibration_tables(const IndexMetadata& metadata) {
  using C = Calibration;
  using T = CalibrationTable;
  if (metadata.levels == 0) return {};
  const std::vector<int64_t> heads = {C::kScopes, metadata.model.layers, metadata.model.kv_heads,
                                      C::kGrid};
  std::vector<int64_t> curves = {C::kScopes, C::kPaths, C::kGrid};
  std::vector<int64_t> coarse = {C::kScopes, std::max(metadata.levels - 1, 1)};
  if (metadata.version < kVersionOfOnePolicy) {
    curves.insert(curves.begin() + 2, kOldPolicies);
    coarse.insert(coarse.begin() + 1, kOldPolicies);
  }
  return {{"calibration.thresholds", &C::thresholds, curves, T::kCurves},
          {"calibration.coarse", &C::coarse, coarse, T::kThresholds},
          {"calibration.shares", &C::shares, heads, T::kShares}};
}

Status check_calibration(
    const Calibration& calibration,
    const std::function<std::span<const float>(const CalibrationTable&)>& table_of,
    const IndexMetadata& metadata, const std::string& label, Code code) {
  const Refuse refuse{label, code};
  if (metadata.levels > 0 && std::ssize(calibration.coarse_keep) != metadata.levels - 1) {
    return refuse("calibration.coarse_keep", concat(calibration.coarse_keep.size(), " values"),
                  metadata.levels - 1);
  }
  for (const CalibrationTable& table : calibration_tables(metadata)) {
    SQZ_RETURN_IF_ERROR(check_table(table, table_of(table), refuse));
  }
  return {};
}

}  // namespace sqz
