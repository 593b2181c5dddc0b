// Kernels find, list and copy a row's layer by these functions.
#pragma once

#include "libruntime/kernels/cuda/decode/context_layer.h"

namespace sqz::cuda {

// The layer of the context that a row names; null: its slot is empty, or none.
__device__ inline const ContextLayer* layer_named(const NamedContexts& named,
                                                  const RequestContext& context) {
  const bool is = context.slot >= 0 && context.slot < named.most_slots;
  const ContextLayer* layers = is ? named.slots[context.slot] : nullptr;
  return layers == nullptr ? nullptr : layers + named.layer;
}

// Every slot of a pair as a list of runs, for so many requests; with a fault nothing.
__device__ inline void list_whole(const ContextLayer& row, const RunLists& lists, int64_t pair,
                                  int head, int requests = 1) {
  const int64_t at = pair * (lists.capacity + 1);
  const auto slots = row.fault != 0 ? 0 : static_cast<uint32_t>(row.keys.slots);
  lists.first[at] = lists.before[at] = 0;
  lists.before[at + (slots > 0 ? 1 : 0)] = slots;
  lists.totals[pair] = {slots > 0 ? 1u : 0u, slots, row.fault != 0 ? ~0u : 0, row.lookup.exact};
  if (head == 0 && row.keys.counters != nullptr) {
    atomicAdd(row.keys.counters, static_cast<unsigned long long>(requests));
  }
}

// By all threads of a block, which then meet.
template <class Layer>
__device__ inline void copy_layer(const Layer& from, Layer& to) {
  static_assert(sizeof(Layer) % 8 == 0);
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(Layer) / 8);
       i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<uint64_t*>(&to)[i] = __ldcg(reinterpret_cast<const uint64_t*>(&from) + i);
  }
}

}  // namespace sqz::cuda
