// Calls on layers with rows of codes or key codes (docs/format.md). Requests of one token, and
// those of options.block = 1 where key codes choose, are served by one kernel, each token by itself
// (kernels/cuda/decode_codes). Other prompts choose whole clusters, and are served from a layer's
// rows in 16 bits, as rows of an index are that has 16 bits (block_server.h).
#pragma once

#include <memory>
#include <vector>

#include "libruntime/cuda/server_setup.h"
#include "libruntime/kernels/cuda/decode_attend/kernel.h"
#include "libruntime/kernels/cuda/decode_codes/kernel.h"
#include "libruntime/kernels/cuda/unpack_rows/kernel.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

class CodedServer {
 public:
  // Null if no layer needs it. Takes all memory. The device is current.
  static Result<std::unique_ptr<CodedServer>> create(const ServerSetup& setup);

  // Whether a layer needs it: one with rows of codes, or with key codes to select by.
  bool serves(int64_t layer) const;
  // Of these, whether prompts read the layer's rows in 16 bits, in blocks of tokens. Where key
  // codes choose for single tokens they do if blocks choose `clusters` instead.
  bool serves_blocks(int64_t layer, bool clusters) const {
    return setup_.max_request_tokens > 1 && (clusters || !chooses_keys(layer));
  }
  // Whether requests of one token read whole clusters of rows of 8 bits, which decode_attend()
  // does; and these rows.
  bool reads_clusters(int64_t layer) const {
    return setup_.uploaded->layer(layer).clusters_of_slots != nullptr && !chooses_keys(layer);
  }
  CodedSource source_of(int64_t layer) const;
  // Whether rows are unpacked for prompts.
  bool unpacks(int64_t layer) const;
  // Unpacks all rows into memory that all layers share, and points `params` there.
  Status unpack(int64_t layer, AttendParams& params, cudaStream_t stream) const;
  // Adds to counters[2] the means that the rows of these runs stand on, in layers that unpack.
  Status count_means(int64_t layer, const RunLists& lists, int64_t blocks,
                     unsigned long long* counters, cudaStream_t stream) const;
  // counters [5]: {selections, keys, vectors, whole, codes}.
  Status attend(const AttendCall& call, unsigned long long* counters);
  // Of the first token, to `out` that has nothing yet. Waits for the GPU.
  Status select(const AttendCall& call, FoundRuns& out);

 private:
  explicit CodedServer(const ServerSetup& setup) : setup_(setup) {}
  // By a lookup; else all keys are read.
  bool selects(int64_t layer) const { return setup_.clusters && setup_.plan->selects(layer); }
  // By key codes.
  bool chooses_keys(int64_t layer) const {
    return selects(layer) && setup_.uploaded->layer(layer).key_codes.bits > 0;
  }
  FinestClusters finest_of(int64_t layer) const;
  CodedParams params_of(int64_t layer) const;
  size_t lay_out(void* base);
  Status allocate();
  Status upload_rotation();

  ServerSetup setup_;
  int64_t chunk_ = 1;  // most requests of one launch
  TeamSizes team_sizes_;
  DeviceMemory memory_;
  CodedWorkspace workspace_;
  TeamExchange* exchange_ = nullptr;
  uint32_t* wanted_ = nullptr;                               // [layers, Hkv]
  unsigned long long* uncounted_ = nullptr;                  // [5] what select() counts
  RunTotals* totals_ = nullptr;                              // [Hkv] of select()
  uint8_t *key_fates_ = nullptr, *cluster_fates_ = nullptr;  // [Hkv, M], [Hkv, clusters]
  int64_t most_slots_ = 0, most_clusters_ = 0;
  // Of the layer that a prompt is served from: [Hkv, M, d] of 16 bits.
  void *unpacked_keys_ = nullptr, *unpacked_values_ = nullptr;
  float* turned_back_ = nullptr;  // [d, d] the rotation transposed; null if no row is rotated
};

}  // namespace sqz::cuda
