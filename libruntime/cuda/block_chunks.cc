#include "libruntime/cuda/block_chunks.h"

#include <algorithm>

#include "libruntime/kernels/cuda/prefill/common/block_table.h"

namespace sqz::cuda {

void BlockChunks::list(const AttendCall& call) {
  blocks_.clear();
  for (int64_t r = 0; r < call.request_count(); ++r) {
    const int64_t end = call.request_begin(r + 1);
    for (int64_t first = call.request_begin(r); first < end;) {
      const int64_t tokens = block_tokens(end - first);
      blocks_.push_back({first, tokens});
      first += tokens;
    }
  }
}

Result<BlockChunk> BlockChunks::next(size_t& begin, int64_t most, int2* table,
                                     cudaStream_t stream) const {
  const size_t end = std::min(blocks_.size(), begin + static_cast<size_t>(most));
  BlockChunk chunk;
  chunk.first = blocks_[begin].first;
  int64_t longest = 0;
  bool uniform = true;
  for (size_t i = begin; i < end; ++i) {
    longest = std::max(longest, blocks_[i].tokens);
    uniform = uniform && (i + 1 == end || blocks_[i].tokens == blocks_[begin].tokens);
  }
  uniform = uniform && longest == blocks_[begin].tokens;
  chunk.blocks.tokens =
      static_cast<int32_t>(blocks_[end - 1].first + blocks_[end - 1].tokens - chunk.first);
  chunk.blocks.count = static_cast<int32_t>(end - begin);
  chunk.blocks.block_tokens = static_cast<int32_t>(longest);
  if (!uniform) {
    for (size_t i = begin; i < end; i += kTablePart) {
      TablePart part;
      part.count = static_cast<int32_t>(std::min(end - i, size_t{kTablePart}));
      for (int32_t j = 0; j < part.count; ++j) {
        const Block& block = blocks_[i + static_cast<size_t>(j)];
        part.blocks[j] = {static_cast<int32_t>(block.first - chunk.first),
                          static_cast<int32_t>(block.tokens)};
      }
      SQZ_RETURN_IF_ERROR(write_table(part, table + (i - begin), stream));
    }
    chunk.blocks.table = table;
  }
  begin = end;
  return chunk;
}

}  // namespace sqz::cuda
