// A finished index written again with other metadata or another calibration; the tensors of its
// layers stay as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "formats/sqz_writer.h"

namespace sqz {

// Publishes at `output`, which may be the index's own path (with `replace`), and returns the size.
// `metadata` is that of the index but for what changes: the producer becomes this build's, tensors
// that it no longer has are left out. Nothing is checked: verify `index` before, or its damage gets
// fresh checksums. `progress` (may be empty) gets 0 .. 1. `put` writes a layer in other rows.
Result<uint64_t> copy_index(Env& env, const SqzFile& index, IndexMetadata metadata,
                            const Calibration& calibration, const std::string& output, bool replace,
                            const std::function<void(double)>& progress = {},
                            const std::function<Status(SqzWriter&, int64_t)>& put = {});

// The index with these layer budgets (of its own model) in it, instead of those that it has.
// kCorrupt if it is damaged: it is read whole and checked first. `threads`: 0 = all cores.
Result<uint64_t> embed_layer_budgets(Env& env, const SqzFile& index, const LayerBudgets& budgets,
                                     const std::string& output, bool replace, int threads);

}  // namespace sqz
