// Calls with several query tokens a request: cut into blocks that share a selection, as the CPU
// backend does, and into chunks of them, with the memory for it. The kernels for Hopper
// (prefill/*/sm90) serve what they can; the sm80 ones serve on other GPUs and what is left, and
// look up for the selectors quest and saap in any case. Rows of codes that a call reads are
// unpacked to 16 bits first.
#pragma once

#include <memory>
#include <vector>

#include "libruntime/cuda/block_chunks.h"
#include "libruntime/cuda/server_setup.h"
#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill/lookup/sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill/unpack_rows/kernel.h"

namespace sqz::cuda {

class BlockServer {
 public:
  // Takes all memory. The device is current.
  static Result<std::unique_ptr<BlockServer>> create(const ServerSetup& setup);

  // Whether the kernels for Hopper take a call: its queries are of the index's element type, and
  // the GPU has compute capability 9.0.
  bool takes_sm90(const AttendCall& call) const;

  // params: of all tokens of the call; `looks_up`: whether the layer's keys are found by a lookup,
  // else params.lists is known or empty. counters [3]: {selections, keys, vectors}.
  Status attend(const AttendCall& call, const AttendParams& params, bool looks_up, bool sm90,
                unsigned long long* counters);
  // The runs of the first block: lists of pairs, one a KV head. They are there when the stream is
  // done.
  Result<RunLists> select(const AttendCall& call, bool sm90);

 private:
  // What grows with the blocks that are served at once.
  struct Chunk {
    DeviceMemory memory;
    int64_t blocks = 1;
    int2* table = nullptr;  // [blocks]
  };

  explicit BlockServer(const ServerSetup& setup);
  Status allocate();
  size_t lay_out_sm80(void* base);
  size_t lay_out_sm90(void* base);
  size_t lay_out_unpacked(void* base);
  // Lists of pairs; they stay until the next call.
  Result<RunLists> look_up(const AttendCall& call, const BlockChunk& chunk, bool sm90,
                           unsigned long long* counters);
  Result<RunLists> look_up_sm90(const AttendCall& call, const BlockChunk& chunk,
                                unsigned long long* counters);
  Status attend_sm90(const AttendParams& params, const QueryBlocks& blocks,
                     cudaStream_t stream) const;
  Status attend_sm80(const AttendParams& params, const QueryBlocks& blocks,
                     cudaStream_t stream) const;
  const uint32_t* wanted_of(int scope, int64_t layer) const {
    return wanted_ + (scope * std::ssize(setup_.lookups) + layer) * setup_.model().kv_heads;
  }

  ServerSetup setup_;
  PrefillShape shape_;
  BlockChunks chunks_;
  int64_t width_ = 0, slots_ = 0;  // most clusters of a level, most slots

  Chunk sm80_;
  uint32_t* wanted_ = nullptr;               // [scopes, layers, Hkv]
  unsigned long long* uncounted_ = nullptr;  // [3] what select() counts
  RunLists lists_;
  Sm80Lookup lookup_;  // the workspace of it
  float* partials_ = nullptr;

  Chunk sm90_;
  RunLists level_lists_[2];  // of the levels in turn
  std::byte *lookup_memory_ = nullptr, *attend_memory_ = nullptr;
  int64_t lookup_bytes_ = 0, attend_bytes_ = 0;

  // Of the layer that is served, where it has rows of codes: [Hkv, M, d].
  DeviceMemory unpacked_memory_;
  UnpackedRows unpacked_;
};

}  // namespace sqz::cuda
