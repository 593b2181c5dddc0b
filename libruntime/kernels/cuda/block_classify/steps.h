// The steps of block_classify(), for the tokens [begin, end) of the call.
#pragma once

#include "libruntime/kernels/cuda/block_classify/kernel.h"

namespace sqz::cuda {

struct Stretch {
  int32_t begin = 0, end = 0;

  __host__ __device__ int32_t rows(const BlockClassify& call) const {
    return (end - begin) * call.lookup.token.group;
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
