// Writing .sqz files of any kind: places for the tensors, checksums, the header and its hash.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/file.h"
#include "formats/sqz_container.h"

namespace sqz {

// The first entries of the metadata of every kind: format, version, kind and origin.
std::map<std::string, std::string> origin_strings(FileKind kind, int64_t version,
                                                  const FileOrigin& origin);

struct ContainerLayout {
  std::map<std::string, std::string> metadata;  // with checksums of zeros
  std::vector<PlannedTensor> tensors;           // with offsets, and paddings between them
  uint64_t data_offset = 0;
  uint64_t bytes = 0;  // of the file

  // `tensors`: with bytes, in file order, the header's hash last. `room`: bytes by which the
  // metadata may grow before commit(). kInvalidArgument if the file would have 2^63 bytes.
  static Result<ContainerLayout> make(std::map<std::string, std::string> metadata,
                                      std::vector<PlannedTensor> tensors, size_t room = 0);
  // The first `data_offset` bytes of the file; kInvalidArgument if the metadata are too long.
  Result<std::string> header() const;
};

// Takes every tensor once, in any order. commit() writes the header and publishes by AtomicFile.
class ContainerWriter {
 public:
  // kExists if PATH is there and `replace` is false.
  static Result<ContainerWriter> create(Env& env, const std::string& path, bool replace,
                                        ContainerLayout layout);

  const std::string& path() const { return path_; }
  const PlannedTensor* find(std::string_view name) const;  // null if there is none
  bool was_put(const PlannedTensor& tensor) const { return hashes_[index_of(tensor)].has_value(); }
  // `tensor` is one of find(). kInternal for data of another size, and for a tensor put before.
  Status put(const PlannedTensor& tensor, std::span<const std::byte> data);
  Status put(std::string_view name, std::span<const std::byte> data);
  // With these entries of the metadata as well; returns the file's size. kInternal if a tensor was
  // not put.
  Result<uint64_t> commit(const std::map<std::string, std::string>& more = {});

 private:
  ContainerWriter(std::string path, ContainerLayout layout, AtomicFile file);
  size_t index_of(const PlannedTensor& tensor) const {
    return static_cast<size_t>(&tensor - layout_.tensors.data());
  }

  std::string path_;
  ContainerLayout layout_;
  std::map<std::string, size_t, std::less<>> by_name_;
  AtomicFile file_;
  std::vector<std::optional<uint64_t>> hashes_;  // of the layout's tensors that were put
};

}  // namespace sqz
