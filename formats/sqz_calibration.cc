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

}  // namespace

std::string calibration_text(const Calibration& calibration) {
  const Json json = {{"queries", calibration.queries},
                     {"source", calibration.source},
                     {"coarse_keep", calibration.coarse_keep}};
  return json_text(json);
}

Status parse_calibration_text(const std::string& text, int levels, const std::string& path,
                              Calibration& calibration) {
  const std::string label = path + ": __metadata__: calibration";
  SQZ_ASSIGN_OR_RETURN(const Json json, parse_json(text, label));
  JsonFields fields(json, label);
  calibration.queries = fields.integer("queries", 0, int64_t{1} << 40);
  calibration.source = fields.text("source");
  const Json* keep = fields.value("coarse_keep");
  const auto want = static_cast<size_t>(std::max(levels - 1, 0));
  if (keep && (!keep->is_array() || keep->size() != want)) {
    fields.complain("coarse_keep", found_text(*keep), concat("an array of ", want));
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  for (const Json& fraction : *keep) {
    const double value = fraction.is_number() ? fraction.get<double>() : -1.0;
    if (!(value > 0.0 && value <= 1.0)) {
      fields.complain("coarse_keep", found_text(fraction), "a number in (0, 1]");
      return fields.status();
    }
    calibration.coarse_keep.push_back(value);
  }
  return {};
}

Status check_calibration(const Calibration& calibration, const IndexMetadata& metadata,
                         const std::string& label, Code code) {
  using C = Calibration;
  const auto refuse = [&](const char* field, int64_t index, float found, const char* expected) {
    return Status(code, bad_field(label, concat("calibration.", field, "[", index, "]"),
                                  concat(found), expected));
  };
  if (metadata.levels == 0) return {};  // every layer is dense: no tables
  const int64_t coarse_levels = std::max(metadata.levels - 1, 1);
  const struct {
    const char* name;
    size_t found;
    int64_t expected;
  } sizes[] = {
      {"coarse_keep", calibration.coarse_keep.size(), metadata.levels - 1},
      {"thresholds", calibration.thresholds.size(), C::kScopes * C::kPaths * C::kGroups * C::kGrid},
      {"coarse", calibration.coarse.size(), C::kScopes * C::kGroups * coarse_levels},
      {"shares", calibration.shares.size(),
       C::kScopes * metadata.model.layers * metadata.model.kv_heads * C::kGrid}};
  for (const auto& size : sizes) {
    if (std::cmp_not_equal(size.found, size.expected)) {
      return {code, bad_field(label, concat("calibration.", size.name),
                              concat(size.found, " values"), concat(size.expected))};
    }
  }

  // A log threshold of -infinity keeps everything; +infinity or NaN would silently keep nothing.
  const auto is_threshold = [](float t) { return t < INFINITY; };
  const auto is_share = [](float share) { return share >= 0.0f && share <= 1.0f; };
  constexpr const char* kThreshold = "a finite number or -infinity";
  if (const int64_t i = first_bad(calibration.thresholds, is_threshold); i >= 0) {
    return refuse("thresholds", i, calibration.thresholds[static_cast<size_t>(i)], kThreshold);
  }
  if (const int64_t i = first_bad(calibration.coarse, is_threshold); i >= 0) {
    return refuse("coarse", i, calibration.coarse[static_cast<size_t>(i)], kThreshold);
  }
  if (const int64_t i = first_bad(calibration.shares, is_share); i >= 0) {
    return refuse("shares", i, calibration.shares[static_cast<size_t>(i)], "a number in [0, 1]");
  }
  for (size_t i = 1; i < calibration.thresholds.size(); ++i) {
    const bool same_curve = i % static_cast<size_t>(C::kGrid) != 0;
    if (same_curve && calibration.thresholds[i] > calibration.thresholds[i - 1]) {
      return refuse("thresholds", static_cast<int64_t>(i), calibration.thresholds[i],
                    "at most the one before");
    }
  }
  return {};
}

}  // namespace sqz
