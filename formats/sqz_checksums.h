// The checks of all contents of .sqz files: checksums of any kind of file, orders of an index.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz {

struct SqzContainer;

using Problems = std::vector<std::string>;  // one sentence each
inline constexpr size_t kMaxProblems = 1000;
// Appends a problem, unless there are kMaxProblems already.
void note(Problems& problems, std::string text);
// ok if there are none, else the first one as a message about `path`.
Status first_of(const Problems& problems, const std::string& path, Code code);

inline constexpr size_t kChecksumChunk = size_t{4} << 20;  // bytes, hashed while in the cache

using Checksums = std::map<std::string, std::string>;  // tensor name -> XXH3-64 hex
// Returns the checksums in the metadata. Adds a problem if they are not an object of strings, or if
// they name a tensor that does not exist.
Checksums read_checksums(const SafetensorsHeader& header, const std::string& path,
                         Problems& problems);

// Compares one tensor of `file` (the whole bytes) with its checksum; paddings must be zeros, and
// all floats but those of the calibration finite. The header's hash is open_container()'s task.
// `advance` (may be empty) gets the number of bytes after each step.
void check_bytes(const TensorInfo& tensor, std::span<const std::byte> file,
                 const Checksums& checksums, const std::function<void(size_t)>& advance,
                 Problems& problems);

// The whole index, for SqzFile::verify(). `bytes`: the whole file. `threads`: 0 = all cores; the
// report does not depend on it. Takes at most 16 MiB a thread, whatever the file's size.
Result<VerifyReport> verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                                  const std::function<void(uint64_t, uint64_t)>& progress,
                                  int threads);

// Every tensor of a small file.
VerifyReport check_tensors(const SqzContainer& container);

}  // namespace sqz
