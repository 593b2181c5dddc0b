// An index whose tensors are a hole in the file: large, and nothing on the disk.
#pragma once

#include <filesystem>

#include "formats/base/hash.h"
#include "formats/container_writer.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"
#include "tests/common/tiny_index.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz::testing {

// Zeros, but for the header and what `contents` names.
inline Status write_sparse_index(const std::string& path, const IndexMetadata& metadata,
                                 const ClusterCounts& clusters,
                                 const std::map<std::string, std::string>& contents = {}) {
  SQZ_ASSIGN_OR_RETURN(auto tensors, plan_tensors(metadata, clusters, path));
  auto strings = metadata_to_strings(metadata);
  strings[kCalibrationKey] = calibration_text(tiny::calibration(metadata));
  SQZ_ASSIGN_OR_RETURN(const ContainerLayout layout,
                       ContainerLayout::make(std::move(strings), std::move(tensors)));
  SQZ_ASSIGN_OR_RETURN(const std::string header, layout.header());
  write_file(path, header);
  std::filesystem::resize_file(path, layout.bytes);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto hash = xxh3_128(std::as_bytes(std::span(header)));
  for (const PlannedTensor& tensor : layout.tensors) {
    const auto content = contents.find(tensor.name);
    file.seekp(static_cast<std::streamoff>(header.size() + tensor.offset));
    if (content != contents.end()) file << content->second;
    if (tensor.name == kHeaderHashName) file.write(reinterpret_cast<const char*>(hash.data()), 16);
  }
  return file.flush() ? Status() : Status(Code::kIo, path);
}

}  // namespace sqz::testing
