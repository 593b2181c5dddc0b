// The interface between the C ABI and the sessions of the backends: session/session.h on the CPU,
// cuda/session.h on a GPU. A session serves one call at a time; sqz.h describes the calls.
#pragma once

#include <cstdint>
#include <span>

#include "libruntime/attention/lse_rows.h"
#include "libruntime/select/plan.h"
#include "libruntime/select/selector.h"
#include "libruntime/session/served_index.h"

namespace sqz {

struct CpuKernels;
class ThreadPool;

struct SessionOptions {
  SelectionRequest selection;
  int64_t block = 0;
  int64_t max_tokens = 0;               // 0 = 4096
  int64_t max_request_tokens = 0;       // 0 = max_tokens
  int threads = 0;                      // 0 = all cores
  const CpuKernels* kernels = nullptr;  // null = the machine's best
  std::shared_ptr<ThreadPool> pool;     // CPU: of a session that has one; null = its own
  // CUDA: the kernels of GPUs before compute capability 9.0, whatever the GPU; for tests.
  bool sm80_kernels = false;
};

// A call whose arguments the C ABI has checked: shapes fit the index, tokens <= max_tokens, indptr
// ascends, tensors are on the session's device.
struct AttendCall {
  int64_t layer = 0;                                     // that has keys
  int64_t query_heads = 0, head_dim = 0, value_dim = 0;  // Hq, d, dv of the layer
  int64_t tokens = 0;                                    // T
  int64_t first_token = 0;                               // its number in messages
  DType dtype = DType::kF32;                             // of q and out: F32, F16, BF16
  const void* q = nullptr;                               // [T, Hq, d]
  void* out = nullptr;                                   // [T, Hq, dv]
  LseRows lse;                                           // of all rows
  const int64_t* positions = nullptr;                    // [T] or null, on the host
  int64_t offset = 0;  // position of the context's first token: of `positions`
  int64_t skip = 0;    // first tokens of the context that are not attended
  // CUDA: the same in device memory, for layers with a window; where they are not null, `positions`
  // are not looked at.
  const int64_t* device_positions = nullptr;
  const int64_t* indptr = nullptr;  // [requests + 1] or null, on the host
  int64_t requests = 0;
  void* stream = nullptr;               // cudaStream_t; CUDA only
  const void* q_before_rope = nullptr;  // [T, Hq, d] of `dtype`, or null

  int64_t request_count() const { return indptr == nullptr ? 1 : requests; }
  // The first token of request r; T for r = request_count(). indptr may be part of a longer one.
  int64_t request_begin(int64_t r) const {
    if (indptr == nullptr) return r == 0 ? 0 : tokens;
    return indptr[r] - indptr[0];
  }
  // In the context of the session. Call it with positions.
  int64_t position(int64_t token) const { return positions[token] - offset; }
  int64_t request_tokens(int64_t r) const { return request_begin(r + 1) - request_begin(r); }
};

// Sums over selections, as in sqz_stats.
struct Counters {
  uint64_t selections = 0, keys_read = 0, keys_possible = 0, bytes_read = 0, bytes_dense = 0;
  void add(const Counters& other, uint64_t times = 1);
};

class ServingSession {
 public:
  virtual ~ServingSession() = default;
  virtual Status attend(const AttendCall& call) = 0;
  // The selection of the first block, one entry a KV head. It is valid until the next call.
  virtual Result<std::span<const HeadSelection>> select(const AttendCall& call) = 0;
  virtual const ServedIndex& index() const = 0;
  virtual const SelectionPlan& plan() const = 0;
  virtual int64_t max_tokens() const = 0;          // of a call
  virtual int64_t max_request_tokens() const = 0;  // of one request of a call
  virtual int device() const = 0;                  // CUDA device; -1 = the CPU
  // The kernels that served the last attend(), as in sqz_stats: a static string.
  virtual const char* route() const = 0;
  // The counters of one layer, or the sum of all with -1.
  virtual Result<Counters> totals(int64_t layer) = 0;
  virtual Status clear_totals() = 0;
};

}  // namespace sqz
