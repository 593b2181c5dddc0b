// Tile sizes and the shared-memory plan of the Hopper attend kernel, and the work that it takes.
#pragma once

#include <cstdint>

#include "libruntime/kernels/cuda/prefill/common/tiles.h"

namespace sqz::cuda::prefill {

inline constexpr int kRows = 128;            // query rows of a tile, 64 a consumer warpgroup
inline constexpr int kSharedLimit = 232448;  // of a block, compute capability 9.0

// One tile of query rows over some of its list: tiles of keys that begin at begin, begin + step, …
// before `end`.
struct alignas(16) WorkItem {
  int32_t block, kv_head, tile;
  int32_t begin, end, step;
  int32_t slot;  // of the partial state; -1: all keys of the list, the result is final
  int32_t unused;
};
static_assert(sizeof(WorkItem) == 32);

struct WorkCounts {
  uint32_t items, splits;
  uint32_t next;  // item that the next free block takes
  uint32_t unused;
};

// The source of a row of a tile: 16-bit numbers in device memory, and the scale of the codes that
// are added to them.
struct alignas(16) RowSource {
  const char* numbers;
  uint32_t scales;  // the scale twice; zeros for an exact row, whatever its codes
};

// Bit 0 of a producer warp's number says keys or values. The bits above say the first chunks of
// rows or the rest; for rows of 8 bits which of a tile's rows, and of which tiles.
constexpr bool takes_values(int warp) {
  return warp % 2 == 1;
}

// kCodedArg: rows of 8 bits, which producer warps decode: there are more of them, in phases that
// take tiles in turn. kGroupsArg: warpgroups of consumers. With one there is room for more
// producers.
template <int kDimArg, int kKeysArg, bool kCodedArg = false, int kGroupsArg = 2>
struct Config {
  static constexpr bool kCoded = kCodedArg;
  static constexpr int kDim = kDimArg;
  static constexpr int kKeys = kKeysArg;                  // of a tile: wgmma's N of Q K
  static constexpr bool kSkips = kKeys <= 128;            // items may leave tiles out
  static constexpr int kChunks = (kDim + 63) / 64;        // of a row, kRowBytes each
  static constexpr int kFirstChunks = (kChunks + 1) / 2;  // those that the first warp fetches
  static constexpr int kGroups = kGroupsArg;
  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kQueryRows = 64 * kGroups;
  static constexpr int kQueryBytes = kQueryRows * kChunks * kRowBytes;
  static constexpr int kTileBytes = kKeys * kChunks * kRowBytes;
  static constexpr int kParts = 2;  // of a tile's rows of 8 bits, a producer each
  static constexpr int kPhases = kGroups == 1 ? 3 : 2;
  static constexpr int kProducerWarps = kCoded ? 2 * kParts * kPhases : 4;  // before the consumers
  static constexpr int kThreads = 32 * (kProducerWarps + kConsumerWarps);
  // Codes have a byte a number, and a source for each row and producer.
  static constexpr int kCodeStages = kCoded ? 2 : 0;  // of a phase
  static constexpr int kCodeBytes = kTileBytes / 2;
  static constexpr int kSourceBytes = kProducerWarps * (kKeys / kParts) * sizeof(RowSource);
  static constexpr int kAllCodeBytes = kCodeStages * (2 * kPhases * kCodeBytes + kSourceBytes);
  static constexpr int kFit =
      (kSharedLimit - 2048 - kQueryBytes - kAllCodeBytes) / (2 * kTileBytes);
  static constexpr int kMost = kKeys > 64 ? 4 : 6;
  static constexpr int kStages = kFit < kMost ? kFit : kMost;
  // Registers of a thread. Producers that fetch many short runs want more than 24.
  static constexpr int kConsumerRegisters = kKeys > 128    ? 232
                                            : !kCoded      ? 216
                                            : kGroups == 1 ? 160
                                                           : 152;
  static constexpr int kProducerRegisters = kKeys > 128    ? 40
                                            : !kCoded      ? 72
                                            : kGroups == 1 ? 112
                                                           : 104;
  // A block that asks for more than it has at its start waits for ever.
  static_assert(32 * (kConsumerWarps * kConsumerRegisters + kProducerWarps * kProducerRegisters) <=
                65536 / kThreads / 8 * 8 * kThreads);
  // Consumers have registers for a tile's masks before they need them.
  static constexpr bool kEarlyMasks = kKeys == 64 && (!kCoded || kGroups == 1);
  static_assert(kKeys % 16 == 0 && kStages >= 2);
};

// Rows of 8 bits on their way.
template <class Config, bool kCoded>
struct CodeStorage {};
template <class Config>
struct CodeStorage<Config, true> {
  // Keys, values: [key][16-bit numbers of a row / 2].
  alignas(16) uint8_t codes[2][Config::kPhases][Config::kCodeStages][Config::kCodeBytes];
  RowSource rows[Config::kProducerWarps][Config::kCodeStages][Config::kKeys / Config::kParts];
};

template <class Config>
struct SharedStorage : CodeStorage<Config, Config::kCoded> {
  alignas(1024) uint8_t queries[Config::kQueryBytes];               // [chunk][row][kRowBytes]
  alignas(1024) uint8_t keys[Config::kStages][Config::kTileBytes];  // [chunk][key][kRowBytes]
  alignas(1024) uint8_t values[Config::kStages][Config::kTileBytes];
  alignas(16) uint32_t masks[Config::kStages][Config::kKeys];  // of tokens, a bit each
  WorkItem items[2];
  uint32_t next_item;  // the number that follows the last one's
  uint64_t item_full[2], item_empty[2];
  uint64_t queries_full, queries_empty;
  uint64_t keys_full[Config::kStages], keys_empty[Config::kStages];
  uint64_t values_full[Config::kStages], values_empty[Config::kStages];
};

}  // namespace sqz::cuda::prefill
