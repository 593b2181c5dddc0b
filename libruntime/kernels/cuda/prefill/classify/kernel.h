// Lookup of the selector saap: all queries of a stretch of tokens go through the networks of their
// KV heads, two products of matrices; the shares of the attention that they give to each bucket are
// added up over the tokens and heads of a block; and the runs of the best buckets. Scores and rule
// are those of libruntime/select/scorers.cc. Weights are float16 (weights.h), products those of
// 22-bit queries and hidden units, sums float32. Pairs are numbered pair = block * Hkv + head.
#pragma once

#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/prefill/classify/weights.h"
#include "libruntime/kernels/cuda/prefill/prefill.h"

namespace sqz::cuda {

inline constexpr int kClassifyTokens = 512;  // of a stretch, at most
// A product's rows and columns come in tiles of so many.
inline constexpr int kProductTile = 128;

// Float16 numbers in the tiles of weights.h, each with what rounding took away from it: words of a
// tile are [2, 32]. Hkv matrices.
struct SplitMatrix {
  uint4* words = nullptr;
  int32_t columns = 0;  // of tiles
  int64_t stride = 0;   // words from one matrix to the next
};

struct BlockClassify {
  // level: clusters = C, offsets, sizes, wanted. Queries as they are after RoPE, unless
  // `frequencies` is null.
  PrefillLookup lookup;
  Device device;
  ClassifierNetwork network;
  const float* frequencies = nullptr;  // [d / 2] radians a token; null: q is before RoPE
  float shrink = 1;                    // of a query after RoPE: as in RopeUndo
  const int64_t* positions = nullptr;  // [T] host memory, if there are frequencies
  int64_t offset = 0;                  // which is taken from them

  // Workspace.
  float* scores = nullptr;  // [pairs, C] log2 of the shares by size
  // Matrices of a stretch of `tokens`, at most kClassifyTokens; a head's rows are token * group +
  // head of the group.
  int32_t tokens = 0;
  SplitMatrix queries, units;  // [rows, d], [rows, H]
  float* logits = nullptr;     // [Hkv, rows, weight_rows(C) * 8] base 2, with the biases
  float* lse = nullptr;        // [Hkv, rows] base 2
};

// Rows that the workspace has for each head.
constexpr int64_t classify_rows(int64_t tokens, int64_t group) {
  return (tokens * group + kProductTile - 1) / kProductTile * kProductTile;
}
// Words of such a matrix of one head.
constexpr int64_t split_words(int64_t rows, int64_t columns) {
  return rows / kWeightRows * weight_columns(columns) * 64;
}

Status block_classify(const BlockClassify& call, cudaStream_t stream);

// ---- Its steps, for the tokens [begin, end) of the call.

struct Stretch {
  int32_t begin = 0, end = 0;

  __host__ __device__ int32_t rows(const BlockClassify& call) const {
    return (end - begin) * call.lookup.shape.group;
  }
};

// call.queries from the queries, before RoPE; zeros in the rows to the end of a tile.
Status split_queries(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream);
// call.units from call.queries.
Status find_units(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream);
// call.logits from call.units.
Status find_logits(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream);
// Adds the shares of the stretch to the scores of its blocks, and makes scores of them where a
// block ends with it.
Status add_shares(const BlockClassify& call, const Stretch& stretch, cudaStream_t stream);

}  // namespace sqz::cuda
