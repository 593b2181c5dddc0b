// Calls whose requests name their contexts in device memory: before the lookup and behind
// attention. Rows are served as they are given, or, so that those of one context stand beside each
// other, in the order of their slots and of what they leave out.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "libruntime/attention/lse_rows.h"
#include "libruntime/kernels/cuda/decode/context_layer.h"

namespace sqz::cuda {

struct ContextRows : NamedContexts {
  DType dtype = DType::kBF16;  // of queries and outputs
  int32_t requests = 0, each = 1;
  int32_t query_heads = 0, kv_heads = 0, dim = 0;
  bool in_order = false;    // of slots
  const void* q = nullptr;  // [requests, Hq, d]
  void* out = nullptr;      // [requests, Hq, d]
  LseRows lse;
  const float* frequencies = nullptr;  // [half] of RoPE, null: queries are never turned
  int32_t half = 0;

  // As they are served, [requests * each]:
  ContextLayer* rows = nullptr;
  void* row_q = nullptr;           // [rows, Hq, d], turned to where the context begins
  const void* row_out = nullptr;   // [rows, Hq, d]
  const float* row_lse = nullptr;  // [rows, Hq]
  int32_t* places = nullptr;       // of the rows, as they are given
  RunLists lists;  // without totals: a lookup makes them; else every row lists all slots
};

// Fills rows, row_q, places and lists.
Status prepare_context_rows(const ContextRows& call, const Device& device, cudaStream_t stream);
// Cuts rows into blocks of the same layer, of at most `most` rows: `table` gets {first row, rows}
// of each and zeros behind the last one, `count` their number. At most kMostCut rows.
inline constexpr int kMostCut = 256;
Status cut_context_rows(const ContextLayer* rows, int32_t count_rows, int32_t most, int2* table,
                        int32_t* count, const Device& device, cudaStream_t stream);
// Merges the states of each request into out and lse. Attention has left them there where `each` is
// 1: see ContextLayer::row.
Status merge_context_rows(const ContextRows& call, const Device& device, cudaStream_t stream);

}  // namespace sqz::cuda
