// A .sqz file that takes no space: a real header, tensors of any size that were never written
// (holes of the file system, which read as zeros), and the header's hash. It can be opened; its
// contents are not an index that could be served or verified.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "formats/sqz_writer.h"

namespace sqz::bench {

// Writes to a file from offset `begin` to `end`.
using Fill = std::function<Status(WriteFile& file, uint64_t begin, uint64_t end)>;

// Creates `path` (kExists if it is there); returns the file's size. With `fill`, it writes what
// would be holes.
Result<uint64_t> write_sparse_index(Env& env, const std::string& path,
                                    const IndexMetadata& metadata,
                                    const std::vector<LayerShape>& shapes, const Fill& fill = {});

}  // namespace sqz::bench
