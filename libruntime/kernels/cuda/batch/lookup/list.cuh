// A list of the batch, and a block's part of a level's clusters: from words that say who chose a
// cluster to those of its children, or to runs and the masks of their keys.
#pragma once

#include <cub/block/block_scan.cuh>

#include "libruntime/kernels/cuda/batch/lookup/kernel.h"
#include "libruntime/kernels/cuda/common/scores.cuh"
#include "libruntime/kernels/cuda/decode/context_layer.cuh"
#include "libruntime/kernels/cuda/prefill/common/rows.cuh"
#include "libruntime/kernels/cuda/ptx/cluster.cuh"

namespace sqz::cuda {

inline constexpr int kBatchThreads = 256;
inline constexpr int kBatchWarps = kBatchThreads / 32;

__device__ inline Sums operator+(Sums a, Sums b) {
  return {a.a + b.a, a.b + b.b};
}

// A block has a part of a list, until it takes a ticket.
class BatchList {
 public:
  using Scan = cub::BlockScan<Sums, kBatchThreads>;
  struct Shared {
    Scan::TempStorage scan;
    uint32_t tally, means, ticket;
    uint8_t places[kBatchWarps][32];  // see write_words()
  };

  __device__ BatchList(const BatchLookup& call, int level, Shared& shared,
                       int on_each = kBatchOnEach)
      : call_(call), p_(call.lookup), k_(level), shared_(shared) {
    const bool own = p_.own != nullptr;
    if (own) ptx::griddepcontrol_wait();  // for the blocks and their layers
    const int lists = (own ? *call.count : call.blocks.count) * p_.kv_heads;
    const int at = static_cast<int>(blockIdx.x);
    const int blocks =
        own ? batch_blocks(p_.device, lists, on_each) : static_cast<int>(gridDim.x) / lists;
    if (at >= blocks * lists) return;
    list_ = at / blocks;
    head_ = list_ % p_.kv_heads;
    const int2 block = block_of(call.blocks, list_ / p_.kv_heads);
    first_ = block.x;
    requests_ = block.y;
    all_ = requests_ == 32 ? ~0u : (1u << requests_) - 1;
    if (own) own_ = p_.own + first_;
    levels_ = layer().levels;
    level_ = layer().level[level];
    if (k_ < levels_ || k_ == 0) {
      parts_ = levels_ == 0 ? blocks : batch_parts(level_.clusters, blocks);
    }
    if (parts_ > 0) set_part(at % blocks);
    if (thread_ == 0) shared.tally = shared.means = 0;
  }

 protected:
  // Whether the block has a part of the level, or of a layer that is read whole.
  __device__ bool looks_up() const { return levels_ > 0 && part_ < parts_; }
  __device__ bool is_whole() const { return levels_ == 0 && k_ == 0 && part_ < parts_; }
  // Lists the keys of a layer that is read whole.
  __device__ void list_all() const {
    const AttendLayer& keys = own_->keys;
    const uint32_t exact = own_->lookup.exact;
    const auto all = call_.masks == nullptr ? 0 : exact + static_cast<uint32_t>(keys.slots);
    const uint32_t first = part_ * kBatchThreads + thread_;
    for (uint32_t key = first; key < all; key += parts_ * kBatchThreads) {
      set_key(key, all_, key < exact ? exact_row(key) : slot_row(key - exact));
    }
    if (part_ != 0 || thread_ != 0) return;
    list_whole(*own_, call_.runs, list_, head_, requests_);
    if (keys.coded.keys.bits > 0) {
      atomicAdd(&keys.counters[2], 2ull * requests_ * keys.coded.count);
    }
  }

  // The layer of the list's requests.
  __device__ const LookupLayer& layer() const {
    return own_ != nullptr ? own_->lookup : static_cast<const LookupLayer&>(p_);
  }
  __device__ const AttendLayer& keys() const { return own_ != nullptr ? own_->keys : call_.keys; }
  __device__ int64_t pair_of(int request) const {
    return static_cast<int64_t>(first_ + request) * p_.kv_heads + head_;
  }
  // [n]: who a cluster is alive for; who chose it, of a group of rows.
  __device__ uint32_t* alive_words(int level) const { return words(level % 2); }
  __device__ uint32_t* chosen_words(int group) const { return words(2 + group); }
  // The parts of a list in the order in which blocks begin, whatever that is: blocks wait for those
  // of the parts before theirs. True if the block's part is another one now. All threads, once,
  // behind griddepcontrol_wait().
  __device__ bool take_ticket() {
    if (thread_ == 0) {
      shared_.ticket = static_cast<uint32_t>(atomicAdd(counts() + kBatchParts, 1ull));
    }
    __syncthreads();
    const int part = static_cast<int>(shared_.ticket);
    if (part == part_) return false;
    set_part(part);
    return true;
  }
  // The counts of the list.
  __device__ unsigned long long* counts() const {
    return call_.counts + int64_t{list_} * (kBatchParts + 1);
  }
  // Bits of the requests that have met NaN or infinity.
  __device__ uint32_t faults_before() const {
    const bool is = lane_ < requests_ && call_.faults[pair_of(lane_)] != 0;
    return __ballot_sync(~0u, is);
  }

  // Adds what the block's threads have, after the block's first barrier; a barrier later, once:
  // post().
  __device__ void tally(uint32_t own) { add_up(own, shared_.tally); }
  __device__ void post(int counter) const { post(counter, shared_.tally); }

  // The words of chosen_words(), of so many groups, become those of the children, or runs.
  __device__ void pass_on(int groups, uint32_t faults) {
    __syncthreads();
    if (k_ + 1 == levels_) return emit(groups, faults);
#pragma unroll 1
    for (int at = begin_ + 32 * warp_; at < end_; at += kBatchThreads) {
      const Cluster own = cluster_at(groups, at + lane_);
      write_words(alive_words(k_ + 1), own.first, own.length, own.word);
    }
  }

  const BatchLookup& call_;
  const LookupParams& p_;
  const ContextLayer* own_ = nullptr;  // null: the parameters have the layer
  LookupLevel level_;
  int levels_ = 0;
  const int k_;                                         // the level
  int part_ = 0, parts_ = 0;                            // of its clusters
  int list_ = 0, head_ = 0, first_ = 0, requests_ = 0;  // `first_`: of the requests
  uint32_t all_ = 0;                                    // a bit for every request
  int begin_ = 0, end_ = 0;                             // clusters of this block
  const int thread_ = static_cast<int>(threadIdx.x), lane_ = thread_ % 32, warp_ = thread_ / 32;

 private:
  static constexpr uint32_t kCounted = 1u << 31;  // in the upper half of a part's counts

  __device__ void set_part(int part) {
    const int tiles = (level_.clusters + kBatchTile - 1) / kBatchTile;
    part_ = part;
    begin_ = tiles * part / parts_ * kBatchTile;
    end_ = min(tiles * (part + 1) / parts_ * kBatchTile, level_.clusters);
  }
  __device__ void add_up(uint32_t own, uint32_t& sum) {
    own = __reduce_add_sync(~0u, own);
    if (lane_ == 0 && own != 0) atomicAdd(&sum, own);
  }
  __device__ void post(int counter, uint32_t sum) const {
    if (thread_ == 0) atomicAdd(&layer().counters[counter], static_cast<unsigned long long>(sum));
  }

  struct Cluster {
    uint32_t first = 0, length = 0;  // children, or slots
    uint32_t word = 0;               // who chose it
  };
  // A cluster beyond the block's has word 0 and no children, and begins where the last one ends.
  __device__ Cluster cluster_at(int groups, int cluster) const {
    const bool is = cluster < end_;
    const uint32_t* offsets = level_.offsets + static_cast<int64_t>(head_) * (level_.clusters + 1) +
                              (is ? cluster : end_);
    if (!is) return {offsets[0], 0, 0};
    uint32_t word = __ldcg(chosen_words(0) + cluster);
    if (groups > 1) word |= __ldcg(chosen_words(1) + cluster);
    return {offsets[0], offsets[1] - offsets[0], word};
  }
  __device__ uint32_t* words(int plane) const {
    return call_.words + (plane * int64_t{call_.lists()} + list_) * p_.width;
  }

  // The list's word of a key, and its row of 8 bits if there is such a list.
  __device__ void set_key(uint32_t key, uint32_t word, uint32_t row) const {
    call_.masks[list_ * call_.mask_stride + key] = word;
    if (call_.rows != nullptr) call_.rows[list_ * call_.mask_stride + key] = row;
  }
  __device__ uint32_t exact_row(uint32_t key) const {
    const AttendLayer& keys = this->keys();
    return kExactRow | static_cast<uint32_t>(head_ * keys.exact + keys.exact_skipped + key);
  }
  __device__ uint32_t slot_row(uint32_t slot) const {
    return static_cast<uint32_t>(head_) * layer().slots + slot;
  }

  // to[first, + length) = word, of every lane; rows[first, + length) = row and so on, if there is
  // such a list. What the lanes have is end to end, and some have nothing. Lane i writes words
  // 32 n + i.
  __device__ void write_words(uint32_t* to, uint32_t first, uint32_t length, uint32_t word,
                              uint32_t* rows = nullptr, uint32_t row = 0) const {
    const uint32_t begin = __shfl_sync(~0u, first, 0);
    const uint32_t end = __reduce_max_sync(~0u, first + length);
    // Lanes that have something come first, in their order.
    const uint32_t own_bit = 1u << lane_, has = __ballot_sync(~0u, length > 0);
    uint8_t* places = shared_.places[warp_];
    if (length > 0) places[__popc(has & (own_bit - 1))] = static_cast<uint8_t>(lane_);
    __syncwarp();
    const int place = places[lane_];
    __syncwarp();
    const bool is = lane_ < __popc(has);
    first = __shfl_sync(~0u, first, place);
    word = __shfl_sync(~0u, word, place);
    row = __shfl_sync(~0u, row, place) - first;
    uint32_t begun = 0;  // lanes whose words begin before `at`
#pragma unroll 1
    for (uint32_t at = begin / 32 * 32; at < end; at += 32) {
      const uint32_t begins = __reduce_or_sync(~0u, is && first - at < 32 ? 1u << (first - at) : 0);
      const int from = begun + __popc(begins & (2 * own_bit - 1)) - 1;
      begun += __popc(begins);
      const uint32_t of = __shfl_sync(~0u, word, from), own = at + lane_;
      const uint32_t from_row = rows == nullptr ? 0 : __shfl_sync(~0u, row, from);
      if (own < begin || own >= end) continue;
      to[own] = of;
      if (rows != nullptr) rows[own] = from_row + own;
    }
  }

  // The sums of the parts before this one. Their blocks have begun and wait for no block behind
  // them; a sum is 0 until its block has written it. Every warp calls this by itself.
  __device__ Sums counts_before(Sums own) const {
    unsigned long long* counts = this->counts();
    if (thread_ == 0) {
      *static_cast<volatile unsigned long long*>(counts + part_) =
          static_cast<unsigned long long>(own.a | kCounted) << 32 | own.b;
    }
    Sums before;
    for (int part = lane_; part < part_; part += 32) {
      unsigned long long count = 0;
      while (count == 0) count = *static_cast<const volatile unsigned long long*>(counts + part);
      before = before +
               Sums{static_cast<uint32_t>(count >> 32) & ~kCounted, static_cast<uint32_t>(count)};
    }
    return {__reduce_add_sync(~0u, before.a), __reduce_add_sync(~0u, before.b)};
  }

  // A warp has clusters [32 w each, 32 (w + 1) each) of the block's, and goes through them by 32.
  // Runs end at the latest with a warp's clusters.
  __device__ void emit(int groups, uint32_t faults) {
    const int each = (end_ - begin_ + kBatchThreads - 1) / kBatchThreads;
    const int first = begin_ + 32 * warp_ * each + lane_;
    const uint32_t lanes_below = (1u << lane_) - 1;
    // Most threads have one cluster: it is read once.
    const Cluster only = each == 1 ? cluster_at(groups, first) : Cluster();
    // body(cluster, the lanes with which runs begin, keys that are listed), by all lanes.
    const auto for_each = [&](const auto& body) {
      uint32_t before = 0;  // the last cluster so far is chosen
#pragma unroll 1
      for (int i = 0; i < each; ++i) {
        const Cluster own = each == 1 ? only : cluster_at(groups, first + 32 * i);
        const uint32_t chosen = __ballot_sync(~0u, own.word != 0);
        body(own, chosen & ~(chosen << 1 | before), own.word != 0 ? own.length : 0);
        before = chosen >> 31;
      }
    };
    Sums own, at, all;
    uint32_t wanted = 0, means = 0;  // keys and clusters, counted for every request
    for_each([&](const Cluster& cluster, uint32_t begins, uint32_t keys) {
      own = own + Sums{begins >> lane_ & 1, keys};
      wanted += keys * __popc(cluster.word);
      means += __popc(cluster.word);
    });
    tally(wanted);
    const bool coded = keys().coded.keys.bits > 0;
    if (coded) add_up(means, shared_.means);
    Scan(shared_.scan)
        .ExclusiveScan(
            own, at, Sums(), [](Sums a, Sums b) { return a + b; }, all);
    const Sums parts = counts_before(all);
    at = parts + Sums{__shfl_sync(~0u, at.a, 0), __shfl_sync(~0u, at.b, 0)};  // of the warp
    const int64_t runs = list_ * (call_.runs.capacity + 1);
    uint32_t* masks = call_.masks + list_ * call_.mask_stride;
    uint32_t* rows = call_.rows == nullptr ? nullptr : call_.rows + list_ * call_.mask_stride;
    const uint32_t exact = layer().exact;
    uint32_t* chosen = rows == nullptr ? nullptr : rows + exact;
    const uint32_t first_row = slot_row(0);
    for_each([&](const Cluster& cluster, uint32_t begins, uint32_t keys) {
      const uint32_t end = at.b + scan_warp(keys), key = end - keys;
      if (begins >> lane_ & 1) {
        const uint32_t run = at.a + __popc(begins & lanes_below);
        call_.runs.first[runs + run] = cluster.first;
        call_.runs.before[runs + run] = key;
      }
      write_words(masks + exact, key, keys, cluster.word, chosen, first_row + cluster.first);
      at = {at.a + __popc(begins), __shfl_sync(~0u, end, 31)};
    });
    // The rule kBudget has counted what its requests chose.
    const bool counts = p_.rule == LookupRule::kThreshold;
    if (counts) post(1);
    if (coded) post(2, shared_.means);
    if (part_ == 0) {
      for (uint32_t key = thread_; key < exact; key += kBatchThreads) {
        set_key(key, all_, exact_row(key));
      }
      if (counts && thread_ == 0 && head_ == 0) {
        atomicAdd(&layer().counters[0],
                  static_cast<unsigned long long>(requests_ - __popc(faults)));
      }
    }
    if (part_ + 1 < parts_ || thread_ != 0) return;
    const Sums total = parts + all;
    call_.runs.before[runs + total.a] = total.b;
    call_.runs.totals[list_] = {total.a, total.b, faults, exact};
  }

  Shared& shared_;
};

}  // namespace sqz::cuda
