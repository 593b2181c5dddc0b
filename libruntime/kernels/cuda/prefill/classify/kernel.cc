#include "libruntime/kernels/cuda/prefill/classify/kernel.h"

#include <algorithm>

#include "libruntime/cuda/cuda_status.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.h"

namespace sqz::cuda {

Status block_classify(const BlockClassify& call, cudaStream_t stream) {
  const QueryBlocks& blocks = call.lookup.blocks;
  const size_t pairs = static_cast<size_t>(blocks.count) * call.lookup.token.kv_heads;
  SQZ_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(call.lookup.faults, 0, pairs * sizeof(uint32_t), stream));
  for (int32_t begin = 0; begin < blocks.tokens; begin += call.tokens) {
    const Stretch stretch = {begin, std::min(blocks.tokens, begin + call.tokens)};
    SQZ_RETURN_IF_ERROR(split_queries(call, stretch, stream));
    SQZ_RETURN_IF_ERROR(find_units(call, stretch, stream));
    SQZ_RETURN_IF_ERROR(find_logits(call, stretch, stream));
    SQZ_RETURN_IF_ERROR(add_shares(call, stretch, stream));
  }
  return sm80_choose(call.lookup, 0, stream);
}

}  // namespace sqz::cuda
