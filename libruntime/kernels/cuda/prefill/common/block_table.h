// The table of a call's blocks, written on a stream from what the host knows: by value, so that a
// graph keeps it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "formats/base/status.h"

namespace sqz::cuda {

inline constexpr size_t kTablePart = 256;

struct TablePart {
  int2 blocks[kTablePart];
  int32_t count;
};

Status write_table(const TablePart& part, int2* to, cudaStream_t stream);

}  // namespace sqz::cuda
