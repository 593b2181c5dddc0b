// Attention for decoding: one query token a request over the exact keys and the selected runs (or
// all slots), read once from memory, split evenly over the GPU whatever the heads selected.
#pragma once

#include <cuda_runtime_api.h>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "formats/coded_rows.h"
#include "libruntime/attention/lse_rows.h"
#include "libruntime/cuda/device.h"
#include "libruntime/kernels/cuda/common/head_dims.h"
#include "libruntime/kernels/cuda/common/run_lists.h"

namespace sqz::cuda {

inline constexpr int kMostPairs = 1024;  // of one launch
inline constexpr int kMostBlocks = 256;  // of a launch: a block a multiprocessor

// Rows of 8 bits: keys and values are codes times a scale plus the mean of their cluster.
struct CodedSource {
  CodedRows keys, values;              // [Hkv, M, d]; bits 0: rows of 16 bits are read
  const uint32_t* clusters = nullptr;  // [Hkv, M] of slots, with kFirstSlot for its first
  const void* mean_keys = nullptr;     // [Hkv, n, d]
  const void* mean_values = nullptr;   // [Hkv, n, d]
  int32_t count = 0;                   // n

  bool present() const { return keys.bits > 0; }
};
inline constexpr uint32_t kFirstSlot = 0x80000000u;

// The keys of a layer of one context.
struct AttendLayer {
  int64_t slots = 0, exact = 0;        // M, E
  int64_t exact_skipped = 0;           // first exact keys that are not attended
  const void* keys = nullptr;          // [Hkv, M, d]
  const void* values = nullptr;        // [Hkv, M, dv]
  const void* exact_keys = nullptr;    // [Hkv, E, d]
  const void* exact_values = nullptr;  // [Hkv, E, dv]
  CodedSource coded;
  // {selections, keys, vectors}, or null. Selections are added to where there are no lists, vectors
  // with rows of codes: the means that nothing has read before, if runs are of whole clusters.
  unsigned long long* counters = nullptr;
};

struct ContextLayer;

struct AttendParams : AttendLayer {
  const void* q = nullptr;  // [requests, Hq, d] of q_dtype
  void* out = nullptr;      // [requests, Hq, dv] of q_dtype
  LseRows lse;              // of all rows
  DType q_dtype = DType::kBF16;
  DType dtype = DType::kBF16;  // of keys and values: BF16 or F16
  int32_t dim = 0;             // d: 64, 96, 128 or 256
  int32_t value_dim = 0;       // dv: here the same
  int32_t requests = 0, kv_heads = 0, group = 0;
  float scale = 0;  // attention scale * log2(e)
  // Recent layers, which sm80_attend() serves: [T] device memory, or null. A token at position p
  // sees exact keys at positions from p - window + 1, or from the beginning of its chunk, on. The
  // first exact key is at exact_position, and `offset` is taken from p.
  const int64_t* positions = nullptr;
  int64_t offset = 0, exact_position = 0;
  int64_t window = 0, chunk = 0;  // one of them is 0
  RunLists lists;                 // without totals: every slot
  // In device memory, [requests]: each request's own layer, in place of that of the parameters, of
  // which `coded` alone says whether rows are of codes. With lists, whose totals say `exact`.
  const ContextLayer* own = nullptr;

  // Workspace, of decode_attend_workspace() bytes; zeroed once.
  void* workspace = nullptr;
  Device device;
};

size_t decode_attend_workspace(int multiprocessors, int dim);

// kUnsupported for a dim or group that there is no kernel for. requests * kv_heads <= kMostPairs.
Status decode_attend(const AttendParams& params, cudaStream_t stream);

}  // namespace sqz::cuda
