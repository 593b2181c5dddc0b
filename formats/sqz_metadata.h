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

JsonText to_json(const LayerBudgets& budgets);
// Reads the budgets of a model with `layers` layers.
LayerBudgets read_budgets(JsonFields& in, int64_t layers);

inline constexpr size_t kMostInFront = 7;  // contexts of a request besides the index itself
// Reads IndexMetadata::after: 1 to kMostInFront ids of contexts.
Result<std::vector<std::string>> context_ids_from_json(const JsonValue& json,
                                                       const std::string& label);

// Reads the metadata of an index, checks ranges, and that the fields fit each other.
Result<IndexMetadata> read_metadata(JsonFields in);

// Equal for builds with the same bytes: the hash of the metadata, without the checksums, and of the
// calibration only `source` if that is not the tail. 16 hexadecimal digits.
std::string build_id(std::map<std::string, std::string> metadata, const std::string& source);

// kMismatch, naming the first setting that differs. Neither hashes nor calibration are compared.
Status check_same_build(std::map<std::string, std::string> found,
                        std::map<std::string, std::string> expected, const std::string& path);

// The parameters (queries, source, coarse_keep) of the calibration of an index, without tables.
Result<Calibration> read_calibration(JsonFields metadata, int levels);

// A table of the calibration: the tensor that holds it, and what its numbers are.
struct CalibrationTable {
  const char* name;
  std::vector<float> Calibration::*values;
  std::vector<int64_t> shape;
  enum { kThresholds, kCurves, kShares } kind;  // curves: thresholds that do not rise
};
// The tables of an index with this metadata, in file order, with the shapes of its version.
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
