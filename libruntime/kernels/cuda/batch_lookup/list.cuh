// A list of the batch, as its kernels see it.
#pragma once

#include "libruntime/kernels/cuda/batch_lookup/kernel.h"

namespace sqz::cuda {

struct BatchList {
  int list, head, first, requests;  // `first`: of the requests
  int heads;                        // of a request: call.padded()
  int rows;                         // query rows: row r is head r % heads of request r / heads
  uint32_t all;                     // a bit for every request

  __device__ BatchList(const BatchLookup& call, int number)
      : list(number),
        head(number % call.lookup.kv_heads),
        first(number / call.lookup.kv_heads * call.chunk),
        requests(min(call.chunk, call.lookup.requests - first)),
        heads(padded_heads(call.lookup.group)),
        rows(requests * heads),
        all(requests == 32 ? ~0u : (1u << requests) - 1) {}

  __device__ static int padded_heads(int group) {
    return group == 1 ? 1 : 1 << (32 - __clz(group - 1));
  }
  // Of row r, in q; below 0: there is none.
  __device__ int64_t query(const BatchLookup& call, int r) const {
    const LookupParams& p = call.lookup;
    const int request = r / heads, of = r % heads;
    if (request >= requests || of >= p.group) return -1;
    return (static_cast<int64_t>(first + request) * p.kv_heads + head) * p.group + of;
  }
  // Of row r, by part.
  __device__ float2* sums(const BatchLookup& call, int r) const {
    return call.sums + (static_cast<int64_t>(list) * kBatchRows + r) * kBatchParts;
  }
  __device__ uint32_t* words(const BatchLookup& call, int level) const {
    return call.words + (level % 2 * int64_t{call.lists()} + list) * call.lookup.width;
  }
  __device__ uint32_t* faults(const BatchLookup& call, int level) const {
    return call.faults + level % 2 * call.lists() + list;
  }
};

}  // namespace sqz::cuda
