// Removes the keys that a policy never reads from an index. The policy is one of the selectors that
// do not look at queries (window, stream, h2o). The file and its memory shrink to about the budget.
// Sessions of that policy give the same bits as before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/select/plan.h"

namespace sqz {

struct PruneReport {
  uint64_t bytes = 0;           // of the output
  double budget = 0, keep = 0;  // of the policy: bytes and keys, on average over layers
  std::vector<int64_t> kept;    // [layers] keys a KV head, without sinks and recent window
};

// Publishes at `output`, which may be the path of the index (with `replace`). Reads and checks the
// whole index first: kCorrupt if it is damaged. kInvalidArgument if the selector looks at queries,
// if the policy has dense layers, if the budget leaves nothing out or a layer without a key, or if
// sessions refuse the policy. kUnsupported if the index has rows of codes or is pruned already.
// `threads`: 0 = all cores.
Result<PruneReport> prune_index(Env& env, std::shared_ptr<const SqzFile> index,
                                const SelectionRequest& policy, const std::string& output,
                                bool replace, int threads);

}  // namespace sqz
