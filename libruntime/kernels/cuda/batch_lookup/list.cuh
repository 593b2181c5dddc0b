// A list of the batch, as its kernels see it.
#pragma once

#include "libruntime/kernels/cuda/batch_lookup/kernel.h"

namespace sqz::cuda {

struct BatchList {
  int list, head, first, requests;  // `first`: of the requests
  int rows;                         // query rows: row r is head r % group of request r / group
  uint32_t all;                     // a bit for every request

  __device__ BatchList(const BatchLookup& call, int number)
      : list(number),
        head(number % call.lookup.kv_heads),
        first(number / call.lookup.kv_heads * call.chunk),
        requests(min(call.chunk, call.lookup.requests - first)),
        rows(requests * call.lookup.group),
        all(requests == 32 ? ~0u : (1u << requests) - 1) {}

  // Of row r, in q and in logits and sums.
  __device__ int64_t query(const BatchLookup& call, int r) const {
    const LookupParams& p = call.lookup;
    return (static_cast<int64_t>(first + r / p.group) * p.kv_heads + head) * p.group + r % p.group;
  }
  __device__ int64_t row(const BatchLookup& call, int r) const {
    return static_cast<int64_t>(list) * call.chunk * call.lookup.group + r;
  }
  __device__ uint32_t* words(const BatchLookup& call, int level) const {
    return call.words + (level % 2 * int64_t{call.lists()} + list) * call.lookup.width;
  }
  __device__ uint32_t* faults(const BatchLookup& call, int level) const {
    return call.faults + level % 2 * call.lists() + list;
  }
};

}  // namespace sqz::cuda
