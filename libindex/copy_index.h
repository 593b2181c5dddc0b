// Writes a finished index again, with other metadata or another calibration.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "formats/sqz_writer.h"

namespace sqz {

// Publishes at `output`, which may be the path of the index (with `replace`), and returns the size.
// The producer becomes this build's. Tensors that `metadata` no longer has are left out. `put`, if
// given, writes a layer; otherwise its tensors are copied. Checks nothing: verify `index` before,
// or its damage gets fresh checksums. `progress` (may be empty) gets 0 to 1.
Result<uint64_t> copy_index(Env& env, const SqzFile& index, IndexMetadata metadata,
                            const Calibration& calibration, const std::string& output, bool replace,
                            const std::function<void(double)>& progress = {},
                            const std::function<Status(SqzWriter&, int64_t)>& put = {});

}  // namespace sqz
