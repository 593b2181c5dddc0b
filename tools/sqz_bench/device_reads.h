// Plain reads of GPU memory: the limit that attention is compared with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sqz::bench {

// Reads two regions of as many bytes, a multiple of 16, once each. `sink`: 4 bytes of device
// memory, which data decides about, so that no read can be left out.
cudaError_t read_device(const void* a, const void* b, size_t bytes, unsigned* sink,
                        cudaStream_t stream);

}  // namespace sqz::bench
