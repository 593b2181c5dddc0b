// "__metadata__" of a .sqz index: to and from IndexMetadata, and the calibration's parameters.
#pragma once

#include <map>
#include <string>

#include "formats/sqz_file.h"

namespace sqz {

// Keys of "__metadata__" that are not fields of IndexMetadata.
inline constexpr const char* kChecksumsKey = "checksums";
inline constexpr const char* kCalibrationKey = "calibration";

// "sqz 0.1.0": this build.
std::string producer_name();

// Ranges, and that the fields fit each other; `label` opens the message, `code` is its code.
Status check_metadata(const IndexMetadata& metadata, const std::string& label, Code code);

std::map<std::string, std::string> metadata_to_strings(const IndexMetadata& metadata);

// format, kind and format_version: kCorrupt or kUnsupported if this build cannot read the file.
Status check_format(const std::map<std::string, std::string>& strings, const std::string& path);
Result<IndexMetadata> metadata_from_strings(const std::map<std::string, std::string>& strings,
                                            const std::string& path);

// The parameters (queries, source, coarse_keep) as JSON text, and back into `calibration`.
std::string calibration_text(const Calibration& calibration);
Status parse_calibration_text(const std::string& text, int levels, const std::string& path,
                              Calibration& calibration);

// Sizes and values of a whole calibration. Nothing is asked of it if every layer is dense.
Status check_calibration(const Calibration& calibration, const IndexMetadata& metadata,
                         const std::string& label, Code code);

}  // namespace sqz
