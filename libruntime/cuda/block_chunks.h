// How a call is cut: into blocks of tokens that share a selection, as the CPU backend does, and
// blocks into chunks that are served at once.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "libruntime/kernels/cuda/prefill/prefill.h"
#include "libruntime/session/serving_session.h"

namespace sqz::cuda {

// Blocks that are served at once, and their tokens.
struct BlockChunk {
  int64_t first = 0;  // token of the call
  QueryBlocks blocks;
};

class BlockChunks {
 public:
  // block: tokens that share a selection; 0 = all of a request. Takes all memory.
  BlockChunks(int64_t block, int64_t max_tokens) : block_(block) {
    blocks_.reserve(static_cast<size_t>(max_tokens));
  }

  int64_t block_tokens(int64_t request_tokens) const {
    return block_ == 0 ? request_tokens : std::min(block_, request_tokens);
  }
  // The most blocks that calls of so many tokens usually have: requests that end within a block
  // leave short ones.
  int64_t usual(int64_t tokens) const {
    return std::min(tokens / block_tokens(tokens) + 64, tokens);
  }

  void list(const AttendCall& call);
  // All tokens as one block.
  void list_whole(int64_t tokens) { blocks_.assign(1, {0, tokens}); }
  void keep_first() { blocks_.resize(1); }
  size_t size() const { return blocks_.size(); }

  // At most `most` blocks from number `begin` on, which moves. Blocks of several lengths are told
  // to the kernels by `table` [most], device memory that is written on the stream.
  Result<BlockChunk> next(size_t& begin, int64_t most, int2* table, cudaStream_t stream) const;

 private:
  struct Block {
    int64_t first = 0, tokens = 0;
  };

  int64_t block_;
  std::vector<Block> blocks_;  // of the call
};

}  // namespace sqz::cuda
