// Calls whose requests name their contexts in device memory: before the lookup and behind
// attention. A row is served alone, or in the order of slots and of what rows leave out, so that
// those of one context stand beside each other. A call may do both: contexts with few rows are
// served alone.
#pragma once

#include <cuda_runtime.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "libruntime/attention/lse_rows.h"
#include "libruntime/kernels/cuda/decode/context_layer.h"

namespace sqz::cuda {

struct ContextRows : NamedContexts {
  DType dtype = DType::kBF16;  // of queries and outputs
  int32_t requests = 0, each = 1;
  int32_t query_heads = 0, kv_heads = 0, dim = 0;
  bool alone = true, in_order = false;  // how rows are served
  const void* q = nullptr;              // [requests, Hq, d]
  void* out = nullptr;                  // [requests, Hq, d]
  LseRows lse;
  const float* frequencies = nullptr;  // [half] of RoPE, null: queries are never turned
  int32_t half = 0;

  // Rows as they are served, requests * each or twice as many: alone, as they are given, and behind
  // these in order. A row that is served one way has no keys for the other.
  ContextLayer* rows = nullptr;
  void* row_q = nullptr;           // [.., Hq, d], turned to where the context begins
  const void* row_out = nullptr;   // [.., Hq, d]
  const float* row_lse = nullptr;  // [.., Hq]
  int32_t* places = nullptr;       // [requests * each]: where each row stands in order
  RunLists lists;  // without totals: a lookup makes them; else every row lists all slots

  // Attention leaves states that are merged; else it writes out and lse.
  bool merges() const { return each > 1 || in_order; }
  __host__ __device__ bool both() const { return alone && in_order; }
  __host__ __device__ int32_t rows_given() const { return requests * each; }
  // The first row in order.
  __host__ __device__ int32_t first_in_order() const { return alone ? rows_given() : 0; }
};
// Rows of a context that are served alone, at most, in a call that does both.
inline constexpr int kMostAlone = 2;

// Fills rows, row_q, places and lists.
Status prepare_context_rows(const ContextRows& call, const Device& device, cudaStream_t stream);
// Cuts rows into blocks of the same layer, of at most `most` rows: `table` gets {first row, rows}
// of each and zeros behind the last one, `count` their number. At most kMostCut rows.
inline constexpr int kMostCut = 256;
Status cut_context_rows(const ContextLayer* rows, int32_t count_rows, int32_t most, int2* table,
                        int32_t* count, const Device& device, cudaStream_t stream);
// Merges the states of each request, at most 32, into out and lse, for a call that merges().
Status merge_context_rows(const ContextRows& call, const Device& device, cudaStream_t stream);

}  // namespace sqz::cuda
