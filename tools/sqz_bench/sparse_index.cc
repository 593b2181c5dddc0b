#include "tools/sqz_bench/sparse_index.h"

#include <cmath>

#include "formats/base/hash.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"

namespace sqz::bench {

Result<uint64_t> write_sparse_index(Env& env, const std::string& path,
                                    const IndexMetadata& metadata,
                                    const std::vector<LayerShape>& shapes, const Fill& fill) {
  IndexMetadata named = metadata;
  named.producer = producer_name();
  SQZ_RETURN_IF_ERROR(check_metadata(named, path, Code::kInvalidArgument));
  SQZ_ASSIGN_OR_RETURN(auto tensors, plan_tensors(named, shapes, path));
  SQZ_ASSIGN_OR_RETURN(tensors, place_tensors(std::move(tensors)));
  Calibration calibration;
  calibration.queries = 1;
  calibration.source = "none";
  for (int k = 1; k < named.levels; ++k) calibration.coarse_keep.push_back(std::pow(0.5, k));
  auto strings = metadata_to_strings(named);
  strings[kCalibrationKey] = calibration_text(calibration);
  strings[kChecksumsKey] = checksum_text(tensors, {});

  const std::string text = header_text(strings, tensors);
  const uint64_t data_offset = data_start(text.size());
  const std::string header = sealed_header(text, data_offset);
  const auto bytes = std::as_bytes(std::span(header));
  SQZ_ASSIGN_OR_RETURN(const auto file, env.create(path));
  SQZ_RETURN_IF_ERROR(file->write(0, bytes));
  // Written at its place far beyond: what lies between is a hole.
  const PlannedTensor& last = tensors.back();
  if (fill) SQZ_RETURN_IF_ERROR(fill(*file, data_offset, data_offset + last.offset));
  SQZ_RETURN_IF_ERROR(file->write(data_offset + last.offset, xxh3_128(bytes)));
  SQZ_RETURN_IF_ERROR(file->close());
  return data_offset + last.offset + last.bytes;
}

}  // namespace sqz::bench
