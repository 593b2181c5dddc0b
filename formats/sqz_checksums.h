// The deep checks of .sqz files: checksums of any kind of file, contents of an index.
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
void note(Problems& problems, std::string text);  // the first kMaxProblems
// ok if there are none, else the first one as a message about `path`.
Status first_of(const Problems& problems, const std::string& path, Code code);

inline constexpr size_t kChecksumChunk = size_t{4} << 20;  // bytes, hashed while in the cache

using Checksums = std::map<std::string, std::string>;  // tensor name -> XXH3-64 hex
// Those of the metadata; none, and a problem, where it is no object of strings or names what is no
// tensor.
Checksums read_checksums(const SafetensorsHeader& header, const std::string& path,
                         Problems& problems);

// One tensor of `file` (its whole bytes) against its checksum; paddings against zeros; 16-bit
// floats are finite. The hash of the header is left to open_container(). `advance` (may be empty)
// is told of the bytes as they are done.
void check_bytes(const TensorInfo& tensor, std::span<const std::byte> file,
                 const Checksums& checksums, const std::function<void(size_t)>& advance,
                 Problems& problems);

// All of an index, for SqzFile::verify(). `bytes`: the whole file. `threads`: 0 = all cores; the
// report does not depend on it. Takes at most 16 MiB a thread, whatever the file's size.
Result<VerifyReport> verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                                  const std::function<void(uint64_t, uint64_t)>& progress,
                                  int threads);

// All tensors of a file that is small enough to be looked at in one go.
VerifyReport check_tensors(const SqzContainer& container);

}  // namespace sqz
