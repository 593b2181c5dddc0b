// Tensor maps: how the copy engine finds a tile in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "formats/base/status.h"

namespace sqz::cuda {

// Of `data` [heads, rows, dim] bf16: boxes of box_rows rows and row_bytes (64 or 128) bytes of
// each, swizzled over row_bytes in shared memory.
Status encode_rows(CUtensorMap& map, const void* data, int64_t heads, int64_t rows, int64_t dim,
                   uint32_t box_rows, uint32_t row_bytes);

}  // namespace sqz::cuda
