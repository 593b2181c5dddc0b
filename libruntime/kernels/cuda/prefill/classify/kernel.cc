#include "libruntime/kernels/cuda/prefill/classify/kernel.h"

#include <algorithm>

#include "libruntime/kernels/cuda/prefill/lookup/select.h"

namespace sqz::cuda {

Status block_classify(const BlockClassify& call, cudaStream_t stream) {
  const PrefillLookup& lookup = call.lookup;
  for (int32_t begin = 0; begin < lookup.blocks.tokens; begin += call.tokens) {
    const Stretch stretch = {begin, std::min(lookup.blocks.tokens, begin + call.tokens)};
    SQZ_RETURN_IF_ERROR(split_queries(call, stretch, stream));
    SQZ_RETURN_IF_ERROR(find_units(call, stretch, stream));
    SQZ_RETURN_IF_ERROR(find_logits(call, stretch, stream));
    SQZ_RETURN_IF_ERROR(add_shares(call, stretch, stream));
  }
  SelectRuns select = {lookup};  // counts no vectors: networks are the model's
  select.scores = call.scores;
  select.stride = lookup.level.clusters;
  return launch_select(select, call.device, stream);
}

}  // namespace sqz::cuda
