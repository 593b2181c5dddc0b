// "__metadata__" of a .sqz index: to and from IndexMetadata, and the calibration's parameters.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>

#include "formats/sqz_file.h"

namespace sqz {

// A key of "__metadata__" that is no field of IndexMetadata.
inline constexpr const char* kCalibrationKey = "calibration";

// Ranges, and that the fields fit each other; `label` opens the message, `code` is its code.
Status check_metadata(const IndexMetadata& metadata, const std::string& label, Code code);

JsonText to_json(const LayerBudgets& budgets);
Result<LayerBudgets> budgets_from_json(const JsonValue& json, const std::string& label);
// Ranges, and that the fields fit each other and `layers` of a model.
Status check_budgets(const LayerBudgets& budgets, int64_t layers, const Refuse& refuse);

Result<IndexMetadata> metadata_from_strings(const std::map<std::string, std::string>& strings,
                                            const std::string& path);

// Equal for builds with the same bytes: the hash of the metadata, without the checksums, and of the
// calibration only `source` if that is not the tail. 16 hexadecimal digits.
std::string build_id(std::map<std::string, std::string> metadata, const std::string& source);

// kMismatch, naming the first setting that differs. Neither hashes nor calibration are compared.
Status check_same_build(const std::map<std::string, std::string>& found,
                        const std::map<std::string, std::string>& expected,
                        const std::string& path);

// Reads the parameters (queries, source, coarse_keep) of a calibration.
Status parse_calibration_text(const std::string& text, int levels, const std::string& path,
                              Calibration& calibration);

// A table of the calibration: the tensor that holds it, and what its numbers are.
struct CalibrationTable {
  const char* name;
  std::vector<float> Calibration::*values;
  std::vector<int64_t> shape;
  enum { kThresholds, kCurves, kShares } kind;  // curves: thresholds that do not rise
};
// Those of an index with this metadata, in file order, with the shapes of its version.
std::vector<CalibrationTable> calibration_tables(const IndexMetadata& metadata);
// Turns tables of the metadata's version into those of the newest one.
void drop_old_policies(const IndexMetadata& metadata, Calibration& calibration);

// Sizes and values of the tables. An index without tables accepts any calibration. `table_of` says
// where the values of a table lie: in `calibration`, or in a file.
Status check_calibration(
    const Calibration& calibration,
    const std::function<std::span<const float>(const CalibrationTable&)>& table_of,
    const IndexMetadata& metadata, const std::string& label, Code code);

}  // namespace sqz
