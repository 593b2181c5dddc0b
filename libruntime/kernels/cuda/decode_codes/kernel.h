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

inline constexpr int kChunkKeys = 32;    // of one cluster, that a warp has at once
inline constexpr int kDigitBins = 1024;  // of scores, a histogram's

// What select() asks for: what became of a slot or a cluster.
enum CodedFate : uint8_t { kFateNone = 0, kFateEstimated = 1, kFateChosen = 2 };

// Memory that a call works with. Pairs are (request, KV head); blocks those of the launch.
struct CodedWorkspace {
  float* logits = nullptr;       // [pairs, clusters of all levels, stride]: of clusters, log2
  float* turned = nullptr;       // [pairs, kMostGroup, d]: queries times the rotation
  uint32_t* keys = nullptr;      // [pairs, coded_key_words()]: where shared memory is too small
  uint32_t* clusters = nullptr;  // [blocks, coded_cluster_words()], likewise
  uint32_t* digits = nullptr;    // [blocks, 2, kDigitBins]
  float* partials = nullptr;     // [blocks, 2, kMostGroup, d + 2]
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
  return chunks * coded_chunk_words(group) + (exact + kMostTeam) * coded_stride(group);
}
// Of a block: scores of a level, fates of all.
constexpr int64_t coded_cluster_words(int64_t width, int64_t total_clusters) {
  return (width + (total_clusters + 3) / 4 + 3) / 4 * 4;
}

// Teams of which size the GPU holds at once.
Result<TeamSizes> coded_team_sizes(const CodedParams& params);

// kUnsupported for a dim or group that there is no kernel for.
Status decode_codes(const CodedParams& params, int team, cudaStream_t stream);

}  // namespace sqz::cuda
