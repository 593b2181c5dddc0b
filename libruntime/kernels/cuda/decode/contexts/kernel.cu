#include <cub/block/block_scan.cuh>

#include "libruntime/kernels/cuda/common/dependent.cuh"
#include "libruntime/kernels/cuda/common/element.cuh"
#include "libruntime/kernels/cuda/decode/context_layer.cuh"
#include "libruntime/kernels/cuda/decode/contexts/kernel.h"

namespace sqz::cuda {
namespace {

constexpr int kPrepareThreads = 256, kMergeThreads = 128;
constexpr int kMostHalf = 256;  // pairs of dimensions that RoPE turns
constexpr int kEarly = 2;       // words of 16 bytes of queries that a thread fetches first

// A block has row blockIdx.x as it is given.
class PrepareRow {
 public:
  explicit __device__ PrepareRow(const ContextRows& params) : p_(params) {}

  __device__ void run() {
    begin_dependent();
    own_ = p_.contexts[given_];
    // One thread reads the slot, which may be filled meanwhile; take_layer() begins with a barrier.
    if (thread_ == 0) s_.named = layer_named(p_, own_);
    fetch_queries();
    const uint64_t order = p_.in_order ? order_of(given_) : 0;
    const int place = p_.in_order ? find_place(order) : given_;
    take_layer();
    if (thread_ == 0) s_.layer.row = given_;
    __syncthreads();
    const bool alone = p_.alone && (!p_.in_order || order == kLast);
    leave(alone ? given_ : place);
    if (p_.lists.totals != nullptr && thread_ < p_.kv_heads) {
      list_whole(s_.layer, p_.lists, int64_t{given_} * p_.kv_heads + thread_, thread_);
    }
    if (!p_.both()) return;
    // For the other way to serve it the row has no keys.
    __syncthreads();
    if (thread_ == 0) {
      set_none(s_.layer.fault);
      s_.layer.row = given_;
    }
    __syncthreads();
    leave(alone ? place : given_);
  }

 private:
  static constexpr uint64_t kLast = ~uint64_t{0};
  // In a call that does both, the rows that are served alone are behind all others.
  __device__ uint64_t order_of(int row) const {
    const RequestContext own = p_.contexts[row];
    const auto order = [](const RequestContext& context) {
      return uint64_t{static_cast<uint32_t>(context.slot)} << 32 |
             static_cast<uint32_t>(context.skip);
    };
    if (!p_.both()) return order(own);
    int alike = 0;
#pragma unroll 4
    for (int i = 0; i < p_.rows_given(); ++i) {
      alike += order(p_.contexts[i]) == order(own) ? 1 : 0;
    }
    return own.slot < 0 || alike <= kMostAlone ? kLast : order(own);
  }
  // Returns the row's place in order: how many rows are before it.
  __device__ int find_place(uint64_t own) {
    if (thread_ == 0) s_.place = 0;
    __syncthreads();
    uint32_t before = 0;
    for (int i = thread_; i < p_.rows_given(); i += kPrepareThreads) {
      const uint64_t other = order_of(i);
      before += other < own || (other == own && i < given_) ? 1 : 0;
    }
    before = __reduce_add_sync(~0u, before);
    if (thread_ % 32 == 0 && before != 0) atomicAdd(&s_.place, before);
    __syncthreads();
    const int place = p_.first_in_order() + static_cast<int>(s_.place);
    if (thread_ == 0) p_.places[given_] = place;
    return place;
  }

  // s_.layer: that of the slot without what the request leaves out.
  __device__ void take_layer() {
    __syncthreads();
    if (s_.named == nullptr) {
      if (thread_ == 0) set_none(own_.slot == -1 ? 0 : 1);
      return;
    }
    copy_layer(*s_.named, s_.layer);
    __syncthreads();
    if (thread_ != 0) return;
    ContextLayer& layer = s_.layer;
    const bool moved = own_.offset != 0, cut = own_.skip != 0;
    if (own_.skip < 0 || own_.skip > layer.skippable || ((moved || cut) && layer.turns == 0) ||
        (moved && p_.frequencies == nullptr)) {
      return set_none(1);
    }
    layer.keys.exact_skipped = own_.skip;
    layer.lookup.exact = static_cast<uint32_t>(layer.keys.exact - own_.skip);
  }
  __device__ void set_none(uint32_t fault) {
    s_.layer = {};
    s_.layer.lookup.levels = 0;
    s_.layer.fault = fault;
  }
  // Leaves the layer and the queries of a row for those who serve it.
  __device__ void leave(int place) {
    auto* to = reinterpret_cast<uint4*>(p_.rows + place);
    const auto* from = reinterpret_cast<const uint4*>(&s_.layer);
    for (int i = thread_; i < static_cast<int>(sizeof(ContextLayer) / 16); i += kPrepareThreads) {
      to[i] = from[i];
    }
    turn_queries(place);
  }

  // The first queries of the row are on their way while its place is found.
  __device__ const uint4* query_row() const {
    return static_cast<const uint4*>(p_.q) + int64_t{given_ / p_.each} * query_words();
  }
  __device__ int query_words() const {  // of 16 bytes
    return p_.query_heads * p_.dim / (p_.dtype == DType::kF32 ? 4 : 8);
  }
  __device__ void fetch_queries() {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      const int word = thread_ + i * kPrepareThreads;
      if (word < query_words()) early_[i] = query_row()[word];
    }
  }
  __device__ void copy_queries(int place) const {
    uint4* to = static_cast<uint4*>(p_.row_q) + int64_t{place} * query_words();
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      const int word = thread_ + i * kPrepareThreads;
      if (word < query_words()) to[word] = early_[i];
    }
    for (int i = thread_ + kEarly * kPrepareThreads; i < query_words(); i += kPrepareThreads) {
      to[i] = query_row()[i];
    }
  }

  // As RopeUndo::apply() with float32 angles.
  __device__ void turn_queries(int place) {
    if (own_.offset == 0 || p_.frequencies == nullptr || s_.layer.fault != 0) {
      return copy_queries(place);
    }
    for (int i = thread_; i < p_.half; i += kPrepareThreads) {
      const float angle = static_cast<float>(own_.offset) * p_.frequencies[i];
      s_.turns[i] = make_float2(cosf(angle), sinf(angle));
    }
    __syncthreads();
    const int numbers = p_.query_heads * p_.dim;
    const int64_t from = int64_t{given_ / p_.each} * numbers, to = int64_t{place} * numbers;
    for (int n = thread_; n < numbers; n += kPrepareThreads) {
      const int i = n % p_.dim;
      float x = load_1(p_.dtype, p_.q, from + n);
      if (i < 2 * p_.half) {
        const bool first = i < p_.half;
        const float2 turn = s_.turns[first ? i : i - p_.half];
        const float other = load_1(p_.dtype, p_.q, from + n + (first ? p_.half : -p_.half));
        x = x * turn.x + (first ? other : -other) * turn.y;
      }
      store_1(p_.dtype, p_.row_q, to + n, x);
    }
  }

  struct Shared {
    ContextLayer layer;
    const ContextLayer* named;  // of the slot; null: there is none
    float2 turns[kMostHalf];
    uint32_t place;
  };
  static __device__ Shared& shared() {
    __shared__ alignas(16) char memory[sizeof(Shared)];
    return *reinterpret_cast<Shared*>(memory);
  }

  const ContextRows& p_;
  Shared& s_ = shared();
  RequestContext own_ = {};
  uint4 early_[kEarly];
  const int given_ = static_cast<int>(blockIdx.x), thread_ = static_cast<int>(threadIdx.x);
};

__global__ void __launch_bounds__(kPrepareThreads)
    prepare_rows_kernel(const __grid_constant__ ContextRows params) {
  PrepareRow(params).run();
}

// A thread has a row.
__global__ void __launch_bounds__(kMostCut)
    cut_rows_kernel(const ContextLayer* rows, int32_t count_rows, int32_t most, int2* table,
                    int32_t* count) {
  using Scan = cub::BlockScan<int, kMostCut>;
  __shared__ typename Scan::TempStorage scan[2];
  __shared__ int first[kMostCut + 1];
  begin_dependent();
  const int row = static_cast<int>(threadIdx.x);
  const bool is = row < count_rows;
  const auto alike = [](const ContextLayer& a, const ContextLayer& b) {
    return a.keys.counters == b.keys.counters && a.keys.exact_skipped == b.keys.exact_skipped &&
           a.fault == b.fault;
  };
  const bool begins = row == 0 || !is || !alike(rows[row], rows[row - 1]);
  int begin, block, blocks;  // begin: of the row's layer
  Scan(scan[0]).InclusiveScan(begins ? row : 0, begin, [](int a, int b) { return max(a, b); });
  const bool cuts = is && (row - begin) % most == 0;
  Scan(scan[1]).ExclusiveSum(cuts ? 1 : 0, block, blocks);
  if (cuts) first[block] = row;
  if (row == 0) {
    first[blocks] = count_rows;
    *count = blocks;
  }
  __syncthreads();
  if (!is) return;
  table[row] = row < blocks ? make_int2(first[row], first[row + 1] - first[row]) : make_int2(0, 0);
}

// A warp a request and query head. A row with NaN makes the request's NaN.
__global__ void __launch_bounds__(kMergeThreads)
    merge_rows_kernel(const __grid_constant__ ContextRows p) {
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t to = int64_t{blockIdx.x} * (kMergeThreads / 32) + threadIdx.x / 32;
  if (to >= int64_t{p.requests} * p.query_heads) return;
  const int64_t request = to / p.query_heads, head = to % p.query_heads;
  // Lane c has context c, and in a call that does both lane `each` + c has the same one in order.
  const int64_t states = p.each * (p.both() ? 2 : 1);
  int64_t row = 0;
  float lse = -INFINITY;
  if (lane < states) {
    const int64_t given = request * p.each + lane % p.each;
    row = (p.alone && lane < p.each ? given : p.places[given]) * p.query_heads + head;
    lse = p.row_lse[row];
  }
  const bool fault = __any_sync(~0u, !(lse < INFINITY));
  float top = lse;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float own = lse == -INFINITY ? 0 : expf(lse - top);
  float sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  for (int column = 0; column < p.dim; column += 32) {
    const int at = column + lane;
    float value = 0;
    for (int c = 0; c < states; ++c) {
      const float weight = __shfl_sync(~0u, own, c);
      const int64_t from = __shfl_sync(~0u, row, c);
      if (weight == 0 || at >= p.dim) continue;
      value += weight * load_1(p.dtype, p.row_out, from * p.dim + at);
    }
    if (at >= p.dim) continue;
    store_1(p.dtype, p.out, to * p.dim + at, fault ? NAN : sum == 0 ? 0 : value / sum);
  }
  if (lane == 0) p.lse[to] = fault ? NAN : sum == 0 ? -INFINITY : top + logf(sum);
}

}  // namespace

Status prepare_context_rows(const ContextRows& call, const Device& device, cudaStream_t stream) {
  return launch_blocks(prepare_rows_kernel, static_cast<unsigned>(call.requests * call.each),
                       kPrepareThreads, 0, device, stream, call);
}

Status cut_context_rows(const ContextLayer* rows, int32_t count_rows, int32_t most, int2* table,
                        int32_t* count, const Device& device, cudaStream_t stream) {
  return launch_blocks(cut_rows_kernel, 1, kMostCut, 0, device, stream, rows, count_rows, most,
                       table, count);
}

Status merge_context_rows(const ContextRows& call, const Device& device, cudaStream_t stream) {
  constexpr int64_t kRows = kMergeThreads / 32;
  const int64_t rows = int64_t{call.requests} * call.query_heads;
  return launch_blocks(merge_rows_kernel, static_cast<unsigned>((rows + kRows - 1) / kRows),
                       kMergeThreads, 0, device, stream, call);
}

}  // namespace sqz::cuda
