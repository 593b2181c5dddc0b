// One loop over threads, for work whose pieces do not depend on each other.
#pragma once

#include <cstdint>
#include <functional>

#include "formats/base/status.h"

namespace sqz {

// The number of threads that an option means. 0: all cores that this process may use, by its
// affinity and by the CPU quota of its cgroup.
int resolve_threads(int threads);

// Calls task(0) .. task(count - 1), each once, on at most `threads` threads (the caller's among
// them). After a failure no new piece is started, and the failure of the lowest index is returned:
// the same one whatever the number of threads. What a task throws becomes a Status.
Status parallel_for(int64_t count, int threads, const std::function<Status(int64_t)>& task);

}  // namespace sqz
