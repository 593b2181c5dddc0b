// The prefill kernels share this on the host and on the device: the tiles of query rows, and the
// tensor maps by which rows of keys are fetched.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "formats/base/status.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

// Kernels for Hopper are launched for this device.
inline constexpr Device kHopper = {.capability = 90, .compiled = 90};

// Rows lie in shared memory in chunks of 64 elements, swizzled over these 128 bytes, so that a box
// may begin at any row. The last chunk is filled up with zeros.
inline constexpr int kRowBytes = 128;
inline constexpr int kBoxes = 8;  // boxes of 1, 2, 4 … 128 rows

// Rows of a tensor [heads, rows, d], in boxes of every power of two, so that a run of any length is
// fetched in few of them.
struct RowMaps {
  CUtensorMap box[kBoxes];
};

Status encode_row_maps(RowMaps& maps, const void* data, int32_t heads, int64_t rows, int32_t dim);

// The keys of a layer.
struct LayerMaps {
  RowMaps keys, values, exact_keys, exact_values;
};
// The same, kept from call to call: a map depends on addresses and shapes alone.
struct KeyMaps : LayerMaps {
  bool made = false;
};
// Unless they are made.
Status encode_key_maps(KeyMaps& maps, const PrefillShape& shape, const AttendLayer& keys);

// The centroids of a level, kept likewise.
struct LevelMaps {
  RowMaps centroids;
  bool made = false;
};

// Kernels that scale a logit and subtract a rounded maximum from it in one step are off by up to
// half a step of float32 at the maximum. Rows whose maximum or log-sum-exp is larger than this, to
// base 2, become NaN.
inline constexpr float kMostLogit = 0x1p27f;
// Nobody looks at the products of wgmma for overflow. Bounds keep them below 2^127, scaled or not:
// other kernels serve layers with larger keys, and a row of a larger query becomes NaN.
inline constexpr float kMostQuery = 0x1p57f;
// The largest key or centroid, as bits: 2^60 of BF16, and 2^15 of F16, so that a key in codes does
// not overflow.
constexpr int16_t most_key(DType dtype) {
  return dtype == DType::kBF16 ? 0x5D80 : 0x7800;
}
// The largest scale of codes: 2^52 or 2^7.
constexpr int16_t most_key_scale(DType dtype) {
  return dtype == DType::kBF16 ? 0x5980 : 0x5800;
}

// Queries [T, Hq, d] in boxes of `tokens` tokens and `heads` heads of one group; what lies past T
// arrives as zeros.
Status encode_query_map(CUtensorMap& map, const PrefillShape& shape, const void* queries,
                        int32_t total_tokens, int32_t heads, int32_t tokens);

// kUnsupported or kInvalidArgument for what the prefill kernels do not take.
Status check_prefill(const PrefillShape& shape, const QueryBlocks& blocks, bool sm90);

// Row r of a tile of query rows is head r % heads of token r / heads.
struct QueryTiles {
  int32_t heads;           // of a tile: the group, or 1
  int32_t tokens;          // of a tile
  int32_t tiles_of_block;  // most; those past the end of a short block are empty
};

inline QueryTiles query_tiles(const QueryBlocks& blocks, int32_t heads, int32_t rows) {
  const int32_t tokens = rows / heads;
  return {heads, tokens, (blocks.block_tokens + tokens - 1) / tokens};
}

}  // namespace sqz::cuda
