// Calls with several query tokens a request, single tokens whose selection decode_lookup() does not
// make, and layers that differ from the model's others or have unusual dimensions: cut into blocks
// that share a selection, as the CPU backend does, and into chunks of them, with the memory for it.
// The kernels for Hopper (prefill/*/sm90) serve what they can; the sm80 ones serve on other GPUs
// and what is left, and look up for the selectors quest and saap in any case. Rows of codes that a
// prompt reads are unpacked to 16 bits first.
#pragma once

#include <memory>
#include <vector>

#include "libruntime/cuda/block_chunks.h"
#include "libruntime/cuda/server_setup.h"
#include "libruntime/kernels/cuda/prefill/attend/sm80/kernel.h"
#include "libruntime/kernels/cuda/prefill/common/tiles.h"
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
  // Memory that grows with the blocks that are served at once.
  struct Chunk {
    DeviceMemory memory;
    int64_t blocks = 1;
    int2* table = nullptr;        // [blocks]
    std::byte* lookup = nullptr;  // workspace; null: it looks nothing up
    int64_t lookup_bytes = 0;
    RunLists lists[2];  // of the levels in turn
  };

  explicit BlockServer(const ServerSetup& setup);
  Status allocate();
  size_t lay_out(bool sm90, void* base);
  size_t lay_out_unpacked(void* base);
  // Lists of pairs; they stay until the next call.
  Result<RunLists> look_up(const AttendCall& call, const BlockChunk& chunk, bool sm90,
                           unsigned long long* counters);
  Status attend_sm90(const AttendParams& params, const QueryBlocks& blocks, KeyMaps* maps,
                     cudaStream_t stream) const;
  const uint32_t* wanted_of(int scope, int64_t layer) const {
    const int64_t each = std::ssize(setup_.lookups) * setup_.model().kv_heads;
    return setup_.lookups[static_cast<size_t>(layer)].wanted + scope * each;
  }

  ServerSetup setup_;
  PrefillShape shape_;
  BlockChunks chunks_;
  int64_t width_ = 0;  // most clusters of a level

  Chunk sm80_, sm90_;
  float* partials_ = nullptr;           // workspace of the sm80 attention,
  std::byte* attend_memory_ = nullptr;  // and of the other
  int64_t attend_bytes_ = 0;
  std::vector<LevelMaps> level_maps_;  // [layers, kMostLevels]

  // The unpacked rows of the layer that is served, if it has rows of codes: [Hkv, M, d].
  DeviceMemory unpacked_memory_;
  UnpackedRows unpacked_;
};

}  // namespace sqz::cuda
