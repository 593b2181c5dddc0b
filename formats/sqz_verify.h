// The deep check behind SqzFile::verify().
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "formats/sqz_file.h"

namespace sqz {

// `bytes`: the whole file. `threads`: 0 = all cores; the report does not depend on it.
VerifyReport verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                          const std::function<void(uint64_t, uint64_t)>& progress, int threads);

}  // namespace sqz
