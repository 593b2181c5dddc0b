// An index without the keys that a policy never reads: for selectors whose choice no query changes
// (window, stream, h2o). The file and what it takes in memory shrink to about the budget; sessions
// of that policy give the same bits as before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "libruntime/select/plan.h"

namespace sqz {

struct PruneReport {
  uint64_t bytes = 0;           // of the output
  double budget = 0, keep = 0;  // on average over layers: what was asked for, resolved
  std::vector<int64_t> kept;    // [layers] keys a KV head, sink and tail not counted
};

// Publishes at `output`, which may be the index's own path (with `replace`). `policy`: as a session
// is asked; layers that it reads whole must not be among what it asks. kInvalidArgument for a
// selector that looks at queries, for a budget that leaves nothing out or a layer without a key,
// and for what sessions refuse; kUnsupported for an index without keys and values or one that is
// pruned already; kCorrupt if it is damaged: it is read whole and checked first. `threads`: 0 = all
// cores.
Result<PruneReport> prune_index(Env& env, std::shared_ptr<const SqzFile> index,
                                const SelectionRequest& policy, const std::string& output,
                                bool replace, int threads);

}  // namespace sqz
