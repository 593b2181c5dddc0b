// A .sqz file that takes no space: a real header, tensors of any size that were never written
// (holes of the file system, which read as zeros), and the header's hash. It can be opened; its
// contents are not an index that could be served or verified.
#pragma once

#include <string>
#include <vector>

#include "formats/sqz_writer.h"

namespace sqz::bench {

// Creates `path` (kExists if it is there); returns the file's size.
Result<uint64_t> write_sparse_index(Env& env, const std::string& path,
                                    const IndexMetadata& metadata,
                                    const std::vector<LayerShape>& shapes);

}  // namespace sqz::bench
