// Decoding over an index with rows of codes or key codes (docs/format.md, "Rows of codes"): one
// query token a request. One kernel does what libruntime/select/squeezed.cc and
// libruntime/attention/attend.cc do: clusters are scored and let keys through, codes of these give
// single keys a score, the best are read, and what is not read is estimated. Without key codes all
// keys of the chosen clusters are read.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "formats/coded_rows.h"
#include "libruntime/attention/lse_rows.h"
#include "libruntime/kernels/cuda/decode_lookup/kernel.h"

namespace sqz::cuda {

inline constexpr int kChunkKeys = 32;      // of one cluster, that a warp has at once
inline constexpr int kCodeBins = 1024;     // of scores, a histogram's
inline constexpr int kCutoffItems = 1024;  // at a cutoff, that a team exchanges

// What select() asks for: what became of a slot or a cluster.
enum CodedFate : uint8_t { kFateNone = 0, kFateEstimated = 1, kFateChosen = 2 };

// What may be the item at a cutoff (cutoff.cuh).
struct alignas(16) CodedItem {
  uint64_t rest;
  uint32_t size, unused;
};

// Where the blocks of a pair look for cutoffs together. Zero between launches but for items.
struct CodedSearchSpace {
  uint32_t bins[2][kCodeBins + 1];
  uint32_t words;  // of workspace.keys that are taken
  CodedItem items[2][kCutoffItems];
};

// Memory that a call works with. Pairs are (request, KV head); blocks those of the launch.
struct CodedWorkspace {
  float* turned = nullptr;             // [pairs, kMostGroup, d]: queries times the rotation
  uint8_t* born = nullptr;             // [pairs, clusters]: whether a parent was chosen
  CodedSearchSpace* search = nullptr;  // [pairs], zeroed once
  uint32_t* clusters = nullptr;        // [pairs, coded_cluster_words()]: where shared memory is too
  uint32_t* keys = nullptr;            // [pairs, coded_key_words()]      small
  float* partials = nullptr;           // [blocks, 2, kMostGroup, d + 2]
};

struct CodedParams {
  // Queries, shapes, levels with thresholds, the rule and what it wants, counters {selections,
  // keys, vectors, codes}, exchange. Its lists, alive and logits are not used.
  LookupParams lookup;
  const void* value_means[kMostLevels] = {};  // [Hkv, n, d] of the levels
  bool everything = false;                    // read all keys: the finest level alone, no rule
  bool estimate = false;                      // what is not read
  uint32_t alive = 0;                         // keys whose codes are looked at, at least
  int32_t exact = 0;                          // E
  const void* exact_keys = nullptr;           // [Hkv, E, d]
  const void* exact_values = nullptr;
  const void* keys = nullptr;  // [Hkv, M, d] of 16 bits, or null:
  const void* values = nullptr;
  CodedRows coded_keys, coded_values;  // [Hkv, M, d] in device memory
  CodedRows key_codes;                 // bits 0: none
  const float* rotation = nullptr;     // [d, d], if any rows are rotated
  void* out = nullptr;                 // [requests, Hq, d] of q_dtype; null: select only
  LseRows lse;
  CodedWorkspace workspace;
  uint8_t* key_fates = nullptr;      // [pairs, M] CodedFate, or null; zeroed before
  uint8_t* cluster_fates = nullptr;  // [pairs, clusters of all levels] likewise

  constexpr int64_t total_clusters() const {
    int64_t total = 0;
    for (int k = 0; k < lookup.levels; ++k) total += lookup.level[k].clusters;
    return total;
  }
};

// Logits of a cluster or key in memory: one a query head, or padded.
constexpr int coded_stride(int group) {
  return group <= 4 ? 4 : kMostGroup;
}
// Words of a chunk: logits, scores and the list of what is chosen; its mean's weights, what it is.
constexpr int64_t coded_chunk_words(int group) {
  return kChunkKeys * (coded_stride(group) + 2) + coded_stride(group) + 2;
}
// Of a pair, however many blocks share it.
constexpr int64_t coded_key_words(int64_t slots, int64_t clusters, int64_t exact, int group) {
  const int64_t chunks = (slots + kChunkKeys - 1) / kChunkKeys + clusters + kMostTeam;
  return chunks * coded_chunk_words(group) + (exact + 2 * kMostTeam) * coded_stride(group);
}
// A block's clusters of all levels: every `team`-th.
constexpr int64_t coded_own_clusters(int64_t total, int levels, int team) {
  return total / team + levels;
}
// Their logits, scores, sizes and fates; of a block, and of a pair, however many blocks share it.
constexpr int64_t coded_block_words(int64_t own, int group) {
  return (own * (coded_stride(group) + 2) + (own + 3) / 4 + 3) / 4 * 4;
}
constexpr int64_t coded_cluster_words(int64_t total, int levels, int group) {
  return coded_block_words(total + kMostTeam * (levels + 5), group);
}

// Teams of which size the GPU holds at once.
Result<TeamSizes> coded_team_sizes(const CodedParams& params);

// kUnsupported for a dim or group that there is no kernel for.
Status decode_codes(const CodedParams& params, int team, cudaStream_t stream);

}  // namespace sqz::cuda
