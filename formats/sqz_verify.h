// The deep check behind SqzFile::verify().
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "formats/sqz_file.h"

namespace sqz {

// `bytes`: the whole file.
VerifyReport verify_index(const SqzFile& file, std::span<const std::byte> bytes,
                          const std::function<void(uint64_t, uint64_t)>& progress);

}  // namespace sqz
